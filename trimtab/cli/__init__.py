"""The command line, with one module per verb: it parses arguments, calls the library and prints."""
