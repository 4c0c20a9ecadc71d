"""vLLM's OpenAI server and its asynchronous engine, all in this process; asked without a network."""

import asyncio
import contextlib
import gc
import json
from types import SimpleNamespace
from unittest import mock

import httpx


def in_this_process(vllm_config, executor_class, log_stats, *_, **__):
    """Stand in for the client that starts the engine core in a process of its own: `make_async_mp_client`."""
    from vllm.v1.engine.core_client import InprocClient

    class Client(InprocClient):
        """Steps the engine core whenever the event loop has nothing else to do."""

        engine_ranks_managed, resources = (0,), SimpleNamespace(engine_dead=False)

        async def get_supported_tasks_async(self):
            return self.get_supported_tasks()

        async def add_request_async(self, request):
            self.add_request(request)

        async def abort_requests_async(self, request_ids):
            self.abort_requests(request_ids)

        async def reset_mm_cache_async(self):
            self.reset_mm_cache()

        async def collective_rpc_async(self, method, timeout=None, args=(), kwargs=None):
            return self.collective_rpc(method, timeout, args, kwargs)

        async def get_output_async(self):
            while True:
                await asyncio.sleep(0 if self.engine_core.scheduler.has_requests() else 0.005)
                outputs = self.get_output()
                if outputs.outputs:
                    return outputs

    return Client(vllm_config, executor_class, log_stats)


class ChatServer:
    """The FastAPI app that `vllm serve` builds; a context manager.

    Args:
        target: directory of the model.
        spec: its speculative config; None serves plainly.
        options: further options of the command.
    """

    def __init__(self, target, spec=None, options=()):
        self.command = ["--model", target, "--dtype", "float32", "--served-model-name", "chat", "--enforce-eager"]
        self.command += ["--max-model-len", "384", "--max-num-seqs", "16", "--disable-log-stats"]
        self.command += ["--distributed-executor-backend", "uni", *options]
        if spec is not None:
            self.command += ["--speculative-config", json.dumps(spec)]
            self.command += ["--worker-extension-cls", "vllm_eesd.host.worker.WorkerExtension"]
        self.loop, self._stack = asyncio.new_event_loop(), contextlib.AsyncExitStack()

    def __enter__(self):
        try:
            self.loop.run_until_complete(self._start())
        except BaseException:
            self.__exit__()
            raise
        return self

    async def _start(self):
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.plugins import load_general_plugins
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.core_client import EngineCoreClient

        load_general_plugins()
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(self.command)
        validate_parsed_serve_args(args)
        with mock.patch.object(EngineCoreClient, "make_async_mp_client", staticmethod(in_this_process)):
            self.engine = await self._stack.enter_async_context(build_async_engine_client(args))
        tasks = await self.engine.get_supported_tasks()
        self.app = build_app(args, tasks, self.engine.model_config)
        await init_app_state(self.engine, self.app.state, args, tasks)
        transport = httpx.ASGITransport(self.app)
        client = httpx.AsyncClient(transport=transport, base_url="http://server", timeout=300)
        self._client = await self._stack.enter_async_context(client)

    def __exit__(self, *_):
        from vllm.distributed import cleanup_dist_env_and_memory

        self.loop.run_until_complete(self._stack.aclose())
        self.loop.close()
        self.engine = self.app = None
        gc.collect()
        cleanup_dist_env_and_memory()

    def worker(self, method, *args):
        """Return what the worker's method answers."""
        return self.loop.run_until_complete(self.engine.collective_rpc(method, args=args))[0]

    def ask(self, bodies, stream=False):
        """Return the messages with which chat requests are answered, all asked at once."""
        return self.loop.run_until_complete(self._ask(bodies, stream))

    async def _ask(self, bodies, stream):
        one = self._streamed if stream else self._whole
        return await asyncio.gather(*(one({"model": "chat"} | body) for body in bodies))

    async def _whole(self, body):
        response = await self._client.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            return {"refused": response.json()["error"]["message"]}
        (choice,) = response.json()["choices"]
        message = choice["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        return answer(message.get("reasoning"), message["content"], calls, choice["finish_reason"])

    async def _streamed(self, body):
        """Join the pieces as OpenAI's client does."""
        said, calls, ended = {"reasoning": "", "content": ""}, [], None
        async with self._client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return {"refused": chunk["error"]["message"]}
                for choice in chunk["choices"]:
                    ended = choice["finish_reason"] or ended
                    for name in said:
                        said[name] += choice["delta"].get(name) or ""
                    for piece in choice["delta"].get("tool_calls") or ():
                        join_call(calls, piece)
        return answer(said["reasoning"], said["content"], [tuple(call) for call in calls], ended)


def join_call(calls, piece):
    while len(calls) <= piece["index"]:
        calls.append(["", ""])
    function = piece.get("function") or {}
    calls[piece["index"]][0] += function.get("name") or ""
    calls[piece["index"]][1] += function.get("arguments") or ""


def answer(reasoning, content, calls, ended):
    return {"reasoning": reasoning or "", "content": content or "", "tool_calls": calls, "ends": ended}
