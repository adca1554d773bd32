"""The command line, with one module per command: it parses arguments, calls the library and prints."""
