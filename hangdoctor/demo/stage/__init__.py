"""The root of the import path of the pretend launch's processes; they import nothing from above."""
