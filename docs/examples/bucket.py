"""Restore from a bucket or a web server, and read only what is needed.

A web server with ranges stands in for the bucket; put `s3://`, `gs://`, `https://` or `hf://org/model` in its place.
The model is restored by ranges of its files: what no shard of this process needs is never sent.
"""

import http.server
import re
import threading
from pathlib import Path

import orbax_t5x as ot

model = Path(__file__).parents[2] / "tests/goldens/safetensors/t5_1_1"  # what the server serves


class Ranges(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        path = model / self.path.lstrip("/")
        self.send_response(200 if path.is_file() else 404)
        self.send_header("Content-Length", str(path.stat().st_size if path.is_file() else 0))
        self.end_headers()

    def do_GET(self):
        path = model / self.path.lstrip("/")
        if not path.is_file():
            return self.send_error(404)
        data = path.read_bytes()
        first, last = map(int, re.findall(r"\d+", self.headers["Range"]))
        if first >= len(data):
            return self.send_error(416)
        part = data[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, format, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        pass  # a client closes connections of which it has what it wants


server = Server(("127.0.0.1", 0), Ranges)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"  # yours: "s3://bucket/model", "gs://…", "hf://google/t5-v1_1-small"

with ot.open_checkpoint(url) as checkpoint:
    print(f"{checkpoint.format}, {len(checkpoint.leaves)} leaves")

# A model that wants the layers of the encoder only.
target = {name: leaf for name, leaf in checkpoint.tree().items() if name.startswith("encoder.block.")}
plan = ot.plan_restore(url, target, strict=False)
files = sum(file.stat().st_size for file in model.glob("*.safetensors"))
print(f"{len(plan.entries)} leaves; {plan.bytes_to_read} bytes are asked for, of files of {files}")
state = plan.execute()
local = ot.restore(model, target, strict=False)
print("the same as from the disk:", all((state[name] == local[name]).all() for name in target))
server.shutdown()
