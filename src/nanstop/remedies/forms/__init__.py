"""Other forms of the operations of one line, which stay in range or are defined where it is not."""
