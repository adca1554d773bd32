"""Parameters of the study models and of other models, exact and by part, next to the usual formula."""
