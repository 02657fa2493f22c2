"""A trained model behind HTTP: python examples/service.py DIR [PORT]

    curl --data-binary "39 weeks and 2 days" localhost:8000     a translation for each line
    curl localhost:8000/health                                  ok, once every length is compiled

The threads of the server share one Translator. Where a framework forks workers, each of them has to
load its own Translator after the fork. A request that takes longer than SECONDS gets status 503.
"""

import sys
import time
from concurrent.futures import CancelledError
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from flaxformer_min import Options, Translator

SECONDS, LARGEST = 10, 1_000_000  # of a request; bytes of one
OPTIONS = Options(beam_size=4)


class Handler(BaseHTTPRequestHandler):
    """Answers one request; the server has the translator."""

    def do_GET(self):
        self.answer(200 if self.path == "/health" else 404, "ok" if self.path == "/health" else "")

    def do_POST(self):
        size, end = int(self.headers.get("Content-Length", 0)), time.monotonic() + SECONDS
        if size > LARGEST:
            return self.answer(413, f"at most {LARGEST} bytes")
        lines = self.rfile.read(size).decode(errors="replace").removesuffix("\n").split("\n")
        try:
            found = self.server.translator.translate(
                lines, OPTIONS, should_stop=lambda: time.monotonic() > end
            )
        except CancelledError:
            return self.answer(503, f"not done within {SECONDS} seconds")
        self.answer(200, "".join(f"{each.text}\n" for each in found))

    def answer(self, status, text):
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(translator, port):
    """Returns a server that is ready to answer; `serve_forever` runs it."""
    server = ThreadingHTTPServer(("", port), Handler)
    server.translator = translator
    return server


if __name__ == "__main__":
    translator = Translator.load(sys.argv[1])
    translator.warm_up(OPTIONS)
    with serve(translator, int(sys.argv[2]) if len(sys.argv) > 2 else 8000) as server:
        print(f"http://localhost:{server.server_port}", flush=True)
        server.serve_forever()
