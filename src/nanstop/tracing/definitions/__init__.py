"""Operations by their definition in plain ones: those that have no form in a wider format."""
