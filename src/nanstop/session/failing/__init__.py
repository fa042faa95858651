"""What is done about a step that fails: it is looked into, explained, and a cure of it proven."""
