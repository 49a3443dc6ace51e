"""A pretend launch of real processes, to see hangdoctor at work without a server or a GPU.

`plan` is what shall happen and what would be the right verdict; `play` starts it and ends it for
certain; `keeper` is the process that does both; `stage` is the program that the processes run.
Nothing else of hangdoctor knows that there is a demo: it is watched as any other launch.
"""
