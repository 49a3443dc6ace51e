"""What the commands do: from a source to a verdict, and what is printed.

stdout is data, stderr is talk. A command is imported when it is run: start-up stays short.
"""
