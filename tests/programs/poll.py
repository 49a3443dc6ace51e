"""A healthy event loop that polls every millisecond, and has nothing else to do."""

import asyncio

from announce import announce


async def serve():
    announce()
    while True:  # noqa: ASYNC110  # polling is the point
        await asyncio.sleep(0.001)


asyncio.run(serve())
