#!/usr/bin/env python3
"""An HTTP server on plain asyncio: counters and a JSON store in memory, connections kept alive.

GET  /start            {"nonce": ..., "time": ...}, drawn once when the program starts
GET  /counter/NAME     {"value": n}
POST /counter/NAME     adds one, {"value": n}
GET  /store            {"count": n}
GET  /store/KEY        the value, or 404
PUT  /store/KEY        stores the JSON body, {"version": n}
DELETE /store/KEY      {"version": n}, or 404
GET  /ticks            {"value": n}: raised every 10 ms by a background task
"""
import argparse
import asyncio
import json
import secrets
import time

BODY_BYTES_MAX = 1 << 20
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed"}


class Refused(Exception):
    """A request that is answered with an error status."""


class Server:
    def __init__(self):
        self.start = {"nonce": secrets.token_hex(16), "time": time.time()}
        self.counters = {}
        self.store = {}
        self.version = 0
        self.ticks = 0

    async def tick(self):
        while True:
            await asyncio.sleep(0.01)
            self.ticks += 1

    def answer(self, method, path, body):
        room, _, name = path.strip("/").partition("/")
        match method, room, name:
            case "GET", "start", "":
                return self.start
            case "GET", "ticks", "":
                return {"value": self.ticks}
            case "GET", "counter", name if name:
                return {"value": self.counters.get(name, 0)}
            case "POST", "counter", name if name:
                self.counters[name] = self.counters.get(name, 0) + 1
                return {"value": self.counters[name]}
            case "GET", "store", "":
                return {"count": len(self.store)}
            case "GET", "store", name if name in self.store:
                return self.store[name]
            case "PUT", "store", name if name:
                self.store[name] = parse(body)
                self.version += 1
                return {"version": self.version}
            case "DELETE", "store", name if name in self.store:
                del self.store[name]
                self.version += 1
                return {"version": self.version}
            case "GET" | "DELETE", _, _:
                raise Refused(404)
        raise Refused(405)

    async def serve(self, reader, writer):
        try:
            while (request := await read_request(reader)) is not None:
                method, path, body = request
                try:
                    status, reply = 200, self.answer(method, path, body)
                except Refused as refused:
                    status, reply = refused.args[0], {"error": REASONS[refused.args[0]]}
                payload = json.dumps(reply).encode() + b"\n"
                writer.write(
                    f"HTTP/1.1 {status} {REASONS[status]}\r\n"
                    f"Content-Type: application/json\r\n"
                    f"Content-Length: {len(payload)}\r\n\r\n".encode()
                    + payload
                )
                await writer.drain()
        except (ConnectionError, EOFError, asyncio.LimitOverrunError, ValueError):
            pass
        finally:
            writer.close()


def parse(body):
    try:
        return json.loads(body)
    except ValueError:
        raise Refused(400) from None


async def read_request(reader):
    """The next request as (method, path, body), or None when the client has hung up."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    length = 0
    for line in lines:
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            length = int(value)
    if not 0 <= length <= BODY_BYTES_MAX:
        raise ValueError("body too long")
    return method, path, await reader.readexactly(length)


async def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    server = Server()
    listener = await asyncio.start_server(server.serve, arguments.host, arguments.port)
    print(f"listening on {arguments.host}:{arguments.port}", flush=True)
    async with listener:
        await asyncio.gather(listener.serve_forever(), server.tick())


asyncio.run(main())
