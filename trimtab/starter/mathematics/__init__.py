"""Generated mathematics: one file a topic; `trimtab.starter.math` is the door."""
