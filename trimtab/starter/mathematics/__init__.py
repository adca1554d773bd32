"""Generated mathematics, used at run time through `trimtab.starter.math`: one file per topic."""
