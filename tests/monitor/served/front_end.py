"""A real HTTP server over a real model, in the four protocols; and what may be wrong with one."""

import itertools
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

Document = dict[str, Any]
Fault = Callable[["FrontEnd", str, Document], Any]
"""What becomes of an answer: another document, or a `Reply` that takes its place."""


class Reply:
    """Bytes and a status instead of a document, or whatever `misbehave` does."""

    def __init__(
        self,
        status: int = 200,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        misbehave: Callable[[BaseHTTPRequestHandler], None] | None = None,
    ) -> None:
        self.status, self.body, self.headers = status, body, headers or {}
        self.misbehave = misbehave


class FrontEnd:
    """Serves `model` (token ids → logits [1, T, V]) on 127.0.0.1 under every protocol's paths."""

    def __init__(self, model: Any, *, texts: tuple[str, ...] = (), context: int = 64) -> None:
        self.model, self.texts, self.context = model, texts, context
        self.name, self.fingerprint = "tiny-int8", "fp-1"
        self.version: str | float = "0.11.0"
        self.weight_version = "default"
        self.fault: Fault = lambda _self, _path, document: document
        self.requests: list[tuple[str, Document, dict[str, str]]] = []
        self._ids = itertools.count()
        front_end = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                front_end.respond(self, {})

            def do_POST(self) -> None:
                size = int(self.headers.get("content-length", 0))
                front_end.respond(self, json.loads(self.rfile.read(size)))

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that goes away early is what some tests are about."""

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def asked(self, path: str) -> list[Document]:
        """Return the bodies of the requests to a path."""
        return [body for at, body, _ in self.requests if at == path]

    def respond(self, handler: BaseHTTPRequestHandler, body: Document) -> None:
        path = handler.path
        headers = {k.lower(): v for k, v in handler.headers.items()}
        self.requests.append((path, body, headers))
        document = self.answer(path, body)
        reply = self.fault(self, path, document) if document is not None else Reply(404, b"{}")
        if not isinstance(reply, Reply):
            reply = Reply(200, json.dumps(reply).encode())
        if reply.misbehave is not None:
            handler.close_connection = True
            reply.misbehave(handler)
            return
        handler.send_response(reply.status)
        for name, value in reply.headers.items():
            handler.send_header(name, value)
        handler.send_header("content-length", str(len(reply.body)))
        handler.end_headers()
        handler.wfile.write(reply.body)

    def answer(self, path: str, body: Document) -> Document | None:
        known: dict[str, Callable[[], Document]] = {
            "/v1/models": self._models,
            "/version": lambda: {"version": self.version},
            "/get_model_info": lambda: {
                "model_path": "org/tiny", "weight_version": self.weight_version,
            },
            "/get_server_info": lambda: {
                "version": self.version, "dtype": "float32", "api_key": "sk-not-for-you",
                "context_length": self.context,
            },
            "/props": lambda: {
                "model_path": "tiny.gguf", "build_info": "b1-0",
                "default_generation_settings": {"n_ctx": self.context},
            },
            "/v1/completions": lambda: self._completions(body),
            "/generate": lambda: self._generate(body),
            "/completion": lambda: self._completion(body),
        }  # fmt: skip
        return known[path]() if path in known else None

    def _models(self) -> Document:
        meta = {"n_vocab": self.width, "size": 1000, "n_params": 500}
        record = {"id": self.name, "root": "org/tiny", "max_model_len": self.context, "meta": meta}
        return {"object": "list", "data": [record | {"created": time.time()}]}

    @property
    def width(self) -> int:
        return len(self.texts) or 96

    def logprobs(self, ids: list[int]) -> Tensor:
        """Return what the model thinks follows each token: float32 [T, V]."""
        with torch.no_grad():
            output = self.model(torch.tensor([ids]))
        return torch.log_softmax(getattr(output, "logits", output)[0].float(), -1)

    def _completions(self, body: Document) -> Document:
        """vLLM's `prompt_logprobs`, and `echo` with `logprobs`."""
        ids = body["prompt"]
        rows = self.logprobs(ids)
        choice: Document = {"index": 0, "text": "", "finish_reason": "length"}
        if (k := body.get("prompt_logprobs")) is not None:
            tables = [
                {str(i): self._entry(row, i) for i in dict.fromkeys([*self._top(row, k), target])}
                for row, target in zip(rows, ids[1:], strict=False)
            ]
            choice |= {"prompt_logprobs": [None, *tables], "prompt_token_ids": ids}
        if body.get("echo"):
            choice["logprobs"] = self._echo(ids, rows, body["logprobs"])
        usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": 0}}
        return {
            "id": f"cmpl-{next(self._ids)}", "object": "text_completion",
            "created": int(time.time()), "model": body["model"],
            "system_fingerprint": self.fingerprint, "choices": [choice], "usage": usage,
        }  # fmt: skip

    def _entry(self, row: Tensor, token: int) -> Document:
        rank = int((row > row[token]).sum()) + 1
        return {"logprob": row[token].item(), "rank": rank, "decoded_token": self._text(token)}

    def _echo(self, ids: list[int], rows: Tensor, k: int) -> Document:
        generated = int(rows[-1].argmax())
        every = [*ids, generated]
        targets = [row[i].item() for row, i in zip(rows, every[1:], strict=True)]
        tops = [
            {self._text(i): row[i].item() for i in dict.fromkeys([*self._top(row, k), target])}
            for row, target in zip(rows, every[1:], strict=True)
        ]
        texts = [self._text(i) for i in every]
        return {"tokens": texts, "token_logprobs": [None, *targets], "top_logprobs": [None, *tops]}

    def _generate(self, body: Document) -> Document:
        """SGLang's native answer."""
        ids, k = body["input_ids"], body["top_logprobs_num"]
        rows = self.logprobs(ids)
        pairs = zip(rows, ids[1:], strict=False)
        tokens = [[None, ids[0], None], *([row[i].item(), i, None] for row, i in pairs)]
        tops = [None, *([[r[i].item(), i, None] for i in self._top(r, k)] for r in rows[:-1])]
        meta = {
            "id": f"r{next(self._ids)}", "prompt_tokens": len(ids), "cached_tokens": 0,
            "weight_version": self.weight_version, "input_token_logprobs": tokens,
            "input_top_logprobs": tops,
        }  # fmt: skip
        return {"text": "", "meta_info": meta}

    def _completion(self, body: Document) -> Document:
        """llama.cpp's answer to one token."""
        ids, k = body["prompt"], body["n_probs"]
        row = self.logprobs(ids)[-1]
        tops = [
            {"id": i, "token": self._text(i), "logprob": row[i].item()} for i in self._top(row, k)
        ]
        return {
            "content": tops[0]["token"], "model": self.name, "tokens_evaluated": len(ids),
            "truncated": False, "completion_probabilities": [{**tops[0], "top_logprobs": tops}],
        }  # fmt: skip

    def _text(self, token: int) -> str:
        return self.texts[token] if self.texts else f"w{token}"

    @staticmethod
    def _top(row: Tensor, k: int) -> list[int]:
        found: list[int] = row.topk(k).indices.tolist()
        return found
