"""Generated general English: a template grammar, word lists, plots and expository paragraphs."""
