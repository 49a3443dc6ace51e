"""A pretend launch of real processes, to see hangdoctor at work without a server or a GPU.

`plan` is what shall happen and what would be the right verdict; `play` starts it under a keeper and
ends it for certain; `stage` is the program that the processes run.
Nothing else of hangdoctor knows that there is a demo: it is watched as any other launch.
"""
