def display(*_, **__):
    pass


HTML = display
