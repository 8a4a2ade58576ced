#!/usr/bin/env python3
"""A small asyncio HTTP server. Its page says which process it is talking to: a number drawn at
the start, which only the memory of the process knows."""

import argparse
import asyncio
import secrets


class Site:
    """The pages, and how often they were asked for."""

    def __init__(self):
        self.identity = secrets.token_hex(16)
        self.served = 0

    def page(self, path):
        """The status and body at a path."""
        self.served += 1
        if path == "/identity":
            return "200 OK", self.identity
        if path == "/served":
            return "200 OK", str(self.served)
        return "404 Not Found", f"no {path} here"


async def talk(site, reader, writer):
    """Answers requests until the client goes away."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode()
            status, body = site.page(path)
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError, IndexError):
        pass
    finally:
        writer.close()


async def main():
    """Serves until it is told to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    port = parser.parse_args().port
    site = Site()
    server = await asyncio.start_server(lambda r, w: talk(site, r, w), port=port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
