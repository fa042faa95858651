"""What structure tells of a model and its optimizer, whoever trains."""
