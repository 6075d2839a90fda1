"""The gateway for Tesseracts, asked by ``tesseract-jax`` and ``tesseract-core`` themselves, and by what they never send."""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from tensord_client import tesseract_wire as wire
from tensord_client.common.tensors import Tensor
from tensord_client.gateway import Listening

from tests.client.test_derivatives import N, X, write_models
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.openpi_gateway import GatewayProcess, installed
from tests.repositories import write_model

#: What the test environment lacks of what their programs import; JAX is that of the tests.
PACKAGES = ("tesseract-core==1.15.0", "tesseract-jax==0.4.0", "pybase64>=1.4,<2")
#: What programs begin with; they are given the gateway's address.
_PREAMBLE = """
import sys
import jax, jax.numpy as jnp, numpy as np
import pytest
from tesseract_core import Tesseract
from tesseract_jax import apply_tesseract

at = sys.argv[1]
X = np.linspace(-1, 1, 8, dtype="f4").reshape(2, 4)
N = np.array([[2], [3]], "i4")
W = np.arange(12, dtype="f4").reshape(4, 3) / 10

def rows(x, n=N):
    return jnp.tanh(x @ W) * n

def close(got, wanted):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (np.shape(one), one.dtype) == (np.shape(other), other.dtype), (one, other)
        np.testing.assert_allclose(np.asarray(one, float), np.asarray(other, float), rtol=2e-5, atol=2e-6)
"""
OPTIONS = ("--max-body-bytes", "1000000", "--max-held-bytes", "1500000", "--max-products", "200", "--body-timeout", "2")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("tesseract")
    models = write_models(folder / "models")
    write_model(
        models,
        "half",
        """
        import jax.numpy as jnp

        inputs, outputs, derivatives = {"state": [{"x": "BF16[2]"}], "t": "FP16[]"}, {"y": "BF16[2]", "z": "FP16[-1]"}, True

        def create(path, config, device):
            def apply(params, inputs):
                return {"y": 3 * inputs["state"][0]["x"], "z": jnp.stack([inputs["t"], inputs["t"] ** 2])}

            return apply, {}
        """,
    )
    write_model(
        models,
        "words",
        """
        inputs, outputs, host = {"text": "BYTES[1]"}, {"same": "BYTES[1]"}, True

        def create(path, config, device):
            return (lambda params, inputs: {"same": inputs["text"]}), {}
        """,
    )
    write_model(
        models,
        "wide",
        """
        import jax.numpy as jnp

        inputs, outputs = {"x": "FP32[1]"}, {"y": "FP32[2097152]"}

        def create(path, config, device):
            return (lambda params, inputs: {"y": jnp.broadcast_to(inputs["x"], 1 << 21)}), {}
        """,
    )
    options = {
        "clients": {"socket": str(folder / "clients.sock")},
        "repository": {"control_mode": "explicit", "load": ["*"]},
    }
    with DaemonProcess(folder, [models], options) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def gateway(daemon: DaemonProcess) -> Iterator[GatewayProcess]:
    with GatewayProcess(daemon.folder, *OPTIONS, module="tensord_client.tesseract") as gateway:
        yield gateway


def program(gateway: GatewayProcess, source: str) -> str:
    """Runs a program of somebody who has tesseract-jax, and returns what it prints."""
    environment = os.environ | {"PYTHONPATH": str(installed("tesseract", *PACKAGES)), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", _PREAMBLE + source, f"http://127.0.0.1:{gateway.port}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_program_of_tesseract_jax(gateway: GatewayProcess) -> None:
    """A model with rows, integer inputs and a nested input: values and every derivative, with and without jit."""
    program(
        gateway,
        """
served = Tesseract.from_url(at + "/rows")
for n, x in ((N, X), (N[0], X[0])):
    def f(x, **how):
        return apply_tesseract(served, {"state": {"x": x, "n": n}}, **how)["y"]
    def g(x, n=n):
        return rows(x, n)
    for made in (lambda h: h, jax.jit):
        close(made(f)(x), g(x))
        close(made(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(x), jax.grad(lambda x: jnp.sum(g(x) ** 2))(x))
        close(made(lambda x: jax.jvp(f, (x,), (2 * x,)))(x), jax.jvp(g, (x,), (2 * x,)))
        close(made(jax.jacrev(f))(x), jax.jacrev(g)(x))
        close(made(jax.jacfwd(f))(x), jax.jacfwd(g)(x))
        many = np.stack([x, 2 * x, 3 * x])
        close(made(jax.vmap(lambda x: f(x, vmap_method="sequential")))(many), jax.vmap(g)(many))
        each = jax.vmap(jax.grad(lambda x: f(x, vmap_method="sequential").sum()))
        close(made(each)(many), jax.vmap(jax.grad(lambda x: g(x).sum()))(many))
    traced = lambda x, n: apply_tesseract(served, {"state": {"x": x, "n": n}})["y"].sum()
    close(jax.jit(jax.grad(traced))(x, n), jax.grad(lambda x: rows(x, n).sum())(x))
many = np.stack([X[0], 2 * X[0], X[1]])
for how in ("expand_dims", "broadcast_all", "auto_experimental"):
    def f(x, n, how=how):
        return apply_tesseract(served, {"state": {"x": x, "n": n}}, vmap_method=how)["y"]
    close(jax.vmap(f, (0, None))(many, N[0]), jax.vmap(rows, (0, None))(many, N[0]))
    each = lambda f: jax.vmap(jax.grad(lambda x, n: f(x, n).sum()), (0, None))(many, N[0])
    close(each(f), each(rows))
    def pushed(f, x, v):
        return jax.vmap(lambda v: jax.jvp(lambda x: f(x, N[0]), (x,), (v,))[1])(v)
    close(pushed(f, X[0], many), pushed(rows, X[0], many))
energy = Tesseract.from_url(at + "/energy/versions/1")
e = lambda x: apply_tesseract(energy, {"x": x})["e"]
close(jax.jit(jax.value_and_grad(e))(X[0]), jax.value_and_grad(lambda x: jnp.sum(jnp.tanh(2 * x)))(X[0]))
assert energy.health() == {"status": "ok"}

# Derivatives of a derivative are those of a model like others.
second = Tesseract.from_url(at + "/rows.pull_back")
def pull(x):
    return apply_tesseract(second, {"state": {"x": x, "n": N[0]}, "cotangent.y": np.ones(3, "f4")})["cotangent.state.x"]
close(jax.jvp(pull, (X[0],), (X[1],)), jax.jvp(jax.grad(lambda x: rows(x, N[0]).sum()), (X[0],), (X[1],)))
""",
    )


def test_names_datatypes_and_sizes_that_the_wire_lacks(gateway: GatewayProcess) -> None:
    """Lists of inputs, BF16 as float32, an output whose size only the model knows, texts, and 64 bits of casts."""
    program(
        gateway,
        """
half = Tesseract.from_url(at + "/half")
x, t = np.array([1.5, -2], "f4"), np.array(3, "f2")
def f(x, t):
    return apply_tesseract(half, {"state": [{"x": x}], "t": t})
def g(x, t):
    return {"y": 3 * x, "z": jnp.stack([t, t ** 2])}
close(f(x, t), g(x, t))
close(jax.jit(f)(x, t), g(x, t))
both = lambda h: jax.grad(lambda x, t: h(x, t)["y"].sum() + h(x, t)["z"].sum().astype("f4"), (0, 1))
close(jax.jit(both(f))(x, t), both(g)(x, t))
close(jax.jacrev(f, (0, 1))(x, t), jax.jacrev(g, (0, 1))(x, t))
words = Tesseract.from_url(at + "/words")
assert words.apply({"text": "gruezi"}) == {"same": ["gruezi"]}
assert words.available_endpoints == ["apply", "abstract_eval", "health"]
with pytest.raises(Exception, match="output 'same' has texts, for which abstract_eval has no words: use apply"):
    apply_tesseract(words, {"text": "gruezi"})
assert Tesseract.from_url(at + "/plain").available_endpoints == ["apply", "abstract_eval", "health"]
with pytest.raises(ValueError, match="tangent provided for non-differentiable input 'x'"):
    jax.jacrev(lambda x: apply_tesseract(Tesseract.from_url(at + "/plain"), {"x": x})["y"])(X)
rows = Tesseract.from_url(at + "/rows")
wide = rows.apply({"state": {"x": X.astype("f8"), "n": N.astype("i8")}})
assert wide["y"].dtype == "f4"
with pytest.raises(ValueError, match="does not accept gpu_transport='cuda_ipc'"):
    rows.with_encoding(gpu_transport="cuda_ipc")
with pytest.raises(ValueError, match="does not accept output_format='json.binref'"):
    rows.with_encoding(output_format="json+binref")
with pytest.raises(Exception, match="'state.x' has the dtype 'complex64'"):
    rows.apply({"state": {"x": X.astype("c8"), "n": N}})
with pytest.raises(RuntimeError, match="404"):
    Tesseract.from_url(at + "/nobody").apply({"x": X})
""",
    )


def encoded(array: Any, **other: Any) -> dict[str, Any]:
    array = np.asarray(array)
    data = {"encoding": "base64", "buffer": base64.b64encode(array.tobytes()).decode()}
    return {"shape": array.shape, "dtype": array.dtype.name, "data": data, **other}


def ask(gateway: GatewayProcess, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE)
    try:
        content = body if isinstance(body, bytes) else json.dumps(body)
        connection.request("POST", path, content, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


ROW = {"state.x": encoded(X[0]), "state.n": encoded(N[0])}
BACK = {"inputs": ROW, "vjp_inputs": ["state.x"], "vjp_outputs": ["y"], "cotangent_vector": {"y": encoded(X[0, :3])}}
JACOBIAN = {"inputs": ROW, "jac_inputs": ["state.x"], "jac_outputs": ["y"]}


def test_outputs_may_have_the_names_of_an_arrays_parts() -> None:
    body = json.dumps({"cotangent_vector": {"shape": encoded(X[0]), "dtype": encoded(X[1])}}).encode()
    vectors = wire.parsed(bytearray(body))["cotangent_vector"]
    for name, row in (("shape", X[0]), ("dtype", X[1])):
        np.testing.assert_array_equal(wire.read(name, vectors[name], Tensor(name, "FP32", (4,))), row)


@pytest.mark.parametrize(
    ("endpoint", "body", "text"),
    [
        ("apply", b"{", "no object in JSON"),
        ("apply", [], "no object in JSON"),
        ("apply", b"[" * 100000, "too deep"),
        ("apply", b'{"inputs":' + b'{"a":' * 400 + b"1" + b"}" * 401, "too many lists|may name"),
        ("apply", b"[" + b"1," * 300000 + b"1]", "300001 values besides base64, at most 262144 may be"),
        ("apply", {}, "inputs are NoneType, a mapping"),
        ("apply", {"inputs": {"other": 1}}, r"of the model it may name \['state.n', 'state.x'\]"),
        ("apply", {"inputs": {**ROW, "state": {"x": encoded(X[0])}}}, "given twice|names one twice"),
        ("apply", {"inputs": {"state.n": encoded(N[0])}}, "state.x"),
        ("abstract_eval", {"inputs": {**ROW, "state.x": {"shape": [1 << 30], "dtype": "float32"}}},
         "'state.x' has 4294967296 bytes, at most 1000000 may be"),
        ("jacobian", {**JACOBIAN, "inputs": {"state.n": encoded(N[0])}}, r"inputs lack \['state.x'\]"),
        ("apply", {"inputs": {**ROW, "state.x": {"shape": [4], "dtype": "float32"}}}, "comes as None"),
        ("apply", {"inputs": {**ROW, "state.x": encoded(X[0], dtype="float128")}}, "dtype 'float128', it may be one of"),
        ("apply", {"inputs": {**ROW, "state.x": encoded(X[0], shape=[-4])}}, "sizes are from 0 to"),
        ("apply", {"inputs": {**ROW, "state.x": encoded(X[0], shape=[1] * 9)}}, "9 dimensions, at most 8 may be"),
        ("apply", {"inputs": {**ROW, "state.x": encoded(X[0], shape=[1 << 30])}}, "takes 4294967296 bytes, and 16 came"),
        ("apply", {"inputs": {**ROW, "state.x": encoded(X[:0, 0], shape=[0, 1 << 31, 1 << 31, 1 << 31])}},
         "has without its sizes of 0 39614081257132168796771975168 bytes"),
        ("apply", {"inputs": {**ROW, "state.x": encoded(X[0], shape=[5])}}, "takes 20 bytes, and 16 came"),
        ("apply", {"inputs": {**ROW, "state.x": encoded(X[None])}}, r"'state.x' has the shape \[1, 2, 4\], a row is \[4\]"),
        ("apply", {"inputs": {"state.x": encoded(X), "state.n": encoded(np.ones((3, 1), "i4"))}}, "2 rows|3 rows"),
        ("apply", {"inputs": {**ROW, "state.n": encoded(X[0, :1])}}, "'state.n' is float32, the model takes INT32"),
        ("apply", {"inputs": {**ROW, "state.n": encoded(np.array([1 << 40]))}}, "'state.n' cannot be an array of INT32"),
        ("apply", {"inputs": {**ROW, "state.x": encoded(X[0], data={"encoding": "base64", "buffer": "a"})}}, "no base64"),
        ("apply", {"inputs": {**ROW, "state.x": encoded(X[0], data={"encoding": "base64", "buffer": 3})}}, "no base64"),
        ("apply", {"inputs": {**ROW, "state.x": encoded(X[0], data={"encoding": "binref", "buffer": "/etc/passwd:0"})}},
         "'binref', None.*neither as files nor in memory of CUDA"),
        ("apply", {"inputs": {**ROW, "state.x": encoded(X[0], data={"encoding": "cuda_ipc", "buffer": ""})}}, "CUDA"),
        ("apply", {"inputs": {**ROW, "state.x": encoded(X[0], data={"encoding": "base64", "compression": "lz4"})}}, "lz4"),
        ("vector_jacobian_product", {**BACK, "vjp_inputs": ["state.n"]}, r"vjp_inputs is \['state.n'\]"),
        ("vector_jacobian_product", {**BACK, "vjp_inputs": []}, "vjp_inputs is"),
        ("vector_jacobian_product", {**BACK, "vjp_outputs": [["y"]]}, "vjp_outputs is"),
        ("vector_jacobian_product", {**BACK, "vjp_outputs": ["y", "y"]}, "twice"),
        ("vector_jacobian_product", {**BACK, "cotangent_vector": {}}, "cotangent_vector is"),
        ("vector_jacobian_product", {**BACK, "cotangent_vector": {"y": encoded(X[0])}}, r"rows \[4\], \[3\] is expected"),
        ("jacobian_vector_product", {"inputs": ROW, "jvp_inputs": ["state.x"], "jvp_outputs": ["y"]}, "tangent_vector is None"),
        ("apply", {"inputs": {"state.x": encoded(X[0]), "state.n": encoded(np.ones((60000, 1), "i4"))}},
         "the rows of inputs have 1200000 bytes, at most 1000000 may be"),
        ("jacobian", {**JACOBIAN, "inputs": {"state.x": encoded(np.ones((67, 4), "f4")), "state.n": encoded(N[0])}},
         "the Jacobian takes 201 products, at most 200 may be"),
    ],
)  # fmt: skip
def test_what_is_refused(gateway: GatewayProcess, endpoint: str, body: Any, text: str) -> None:
    status, answer = ask(gateway, f"/rows/{endpoint}", body)
    assert (status, [*answer["detail"][0]]) == (422, ["type", "loc", "msg"]), answer
    message = answer["detail"][0]["msg"]
    assert re.search(text, message), message
    assert "passwd" not in message
    status, answer = ask(gateway, "/rows/apply", {"inputs": ROW})
    assert (status, answer["y"]["shape"]) == (200, [3])


def test_why_a_product_is_not_there_is_said(gateway: GatewayProcess) -> None:
    given = {
        "inputs": {"x": encoded(X[0])},
        "jvp_inputs": ["x"],
        "jvp_outputs": ["y"],
        "tangent_vector": {"x": encoded(X[0])},
    }
    for model, why in (
        ("mixed", "TypeError: can't apply forward"),
        ("plain", "the model.py of 'plain' has to say deriv"),
    ):
        status, answer = ask(gateway, f"/{model}/jacobian_vector_product", given)
        assert status == 422
        assert f"model '{model}' has no push_forward: {why}" in answer["detail"][0]["msg"]


def test_what_is_refused_before_it_is_read(gateway: GatewayProcess) -> None:
    assert ask(gateway, "/rows/apply", {"inputs": ROW}, Accept="application/json+binref")[0] == 406
    assert ask(gateway, "/rows/apply", {"inputs": ROW}, Accept="application/*; gpu_transport=cuda_ipc")[0] == 406
    assert ask(gateway, "/rows/apply", b" " * 1000001)[0] == 413
    for path in ("/nobody/apply", "/rows/versions/7/apply", "/rows/versions/x/apply"):
        status, answer = ask(gateway, path, {"inputs": ROW})
        assert (status, type(answer["detail"])) == (404, str), answer
    begun = b"POST /rows/apply HTTP/1.1\r\nHost: here\r\nContent-Length: 900000\r\n\r\n" + b" " * 899999
    with contextlib.ExitStack() as opened:
        slow = [opened.enter_context(socket.create_connection(("127.0.0.1", gateway.port))) for _ in range(2)]
        for each in slow:
            each.sendall(begun)
        # Both together are above the bound; one that remains does not end in time.
        assert {b"503"} <= {each.recv(100).split()[1] for each in slow} <= {b"503", b"408"}
    with socket.create_connection(("127.0.0.1", gateway.port)) as slow[0]:
        slow[0].sendall(begun)
        assert slow[0].recv(100).split()[1] == b"408"
    assert ask(gateway, "/rows/apply", {"inputs": ROW})[0] == 200


def test_a_model_that_is_loaded_anew_and_keys(daemon: DaemonProcess, tmp_path: Path) -> None:
    """A client goes on when inputs have other shapes; without a key nobody is answered."""
    keys = tmp_path / "keys"
    keys.write_text("first second")
    with GatewayProcess(daemon.folder, "--api-key-file", str(keys), module="tensord_client.tesseract") as gateway:
        known = {"Authorization": "Basic " + base64.b64encode(b"api-key:second").decode()}
        assert ask(gateway, "/plain/apply", {"inputs": {"x": encoded(X)}}, **known)[0] == 200
        refused = ask(gateway, "/plain/apply", {"inputs": {"x": encoded(X)}})
        assert refused == (
            401,
            {"detail": "the API key is none of the gateway's: use http://api-key:KEY@HOST:PORT/MODEL"},
        )
        wide = {"inputs": {"x": encoded(X[None])}}
        assert ask(gateway, "/plain/apply", wide, **known)[0] == 422
        model = daemon.folder / "models" / "plain" / "1" / "model.py"
        model.write_text(model.read_text().replace("FP32[4]", "FP32[2, 4]"))
        daemon.request("POST", "/v2/repository/models/plain/load", b"{}")
        time.sleep(1.1)  # a look-up holds for a second
        status, answer = ask(gateway, "/plain/apply", wide, **known)
        assert (status, answer.get("y", {}).get("shape")) == (200, [1, 2, 4]), answer
        assert gateway.stop() == 0
    assert "Traceback" not in gateway.log


def test_an_input_of_one_row_goes_with_rows_of_others(gateway: GatewayProcess) -> None:
    """Its gradient is the sum over the rows; every row of its Jacobian is there. A gradient has the datatype that came."""
    program(
        gateway,
        """
second = Tesseract.from_url(at + "/rows.pull_back")
many = np.stack([X[0], 2 * X[0], X[1]])
def f(x, v):
    return apply_tesseract(second, {"state": {"x": x, "n": N[0]}, "cotangent.y": v})["cotangent.state.x"]
def g(x, v):
    return jax.vjp(lambda x: rows(x, N[0]), x)[1](jnp.broadcast_to(v, (3, 3)))[0]
for v in (np.arange(3, dtype="f4"), np.ones((1, 3), "f4")):
    loss = lambda f: jax.jit(jax.grad(lambda x, v: (f(x, v) ** 2).sum(), (0, 1)))(many, v)
    close(loss(f), loss(g))
    close(jax.jvp(f, (many, v), (many, 2 * v)), jax.jvp(g, (many, v), (many, 2 * v)))
    close(jax.jacrev(f, 1)(many, v), jax.jacrev(g, 1)(many, v))
wide = {"x": X.astype("f8"), "n": N}
asked = {"vjp_inputs": ["state.x"], "vjp_outputs": ["y"], "cotangent_vector": {"y": np.ones((2, 3))}}
(made,) = Tesseract.from_url(at + "/rows").vector_jacobian_product({"state": wide}, **asked).values()
assert made.dtype == "f8"
close(made.astype("f4"), jax.grad(lambda x: rows(x).sum())(X))
""",
    )


def test_gradients_by_inputs_that_vmap_does_not_map(gateway: GatewayProcess) -> None:
    program(
        gateway,
        """
second = Tesseract.from_url(at + "/rows.pull_back")
for how in ("broadcast_all", "sequential"):
    def f(x, v):
        made = apply_tesseract(second, {"state": {"x": x, "n": N[0]}, "cotangent.y": v}, vmap_method=how)
        return made["cotangent.state.x"].sum()
    def g(x, v):
        return jax.vjp(lambda x: rows(x, N[0]), x)[1](v)[0].sum()
    many = np.stack([X[0], 2 * X[0], X[1]])
    each = lambda f: jax.vmap(jax.grad(f, (0, 1)), (0, None))(many, np.ones(3, "f4"))
    close(each(f), each(g))
""",
    )


def test_certificates(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Connections that never shake hands are among those that there may be."""
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    made.private_key_and_cert_chain_pem.write_to_path(tmp_path / "all.pem")
    trusts = ssl.create_default_context()
    authority.configure_trust(trusts)
    options = ("--certificate", str(tmp_path / "all.pem"), "--key", str(tmp_path / "all.pem"), "--max-connections", "8")

    def ask_health() -> bool:
        connection = http.client.HTTPSConnection("127.0.0.1", gateway.port, timeout=PATIENCE, context=trusts)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/rows/health")
            return connection.getresponse().status == 200
        return False

    with GatewayProcess(daemon.folder, *options, module="tensord_client.tesseract") as gateway:
        assert ask_health()
        with contextlib.ExitStack() as opened:
            place = ("127.0.0.1", gateway.port)
            many = [opened.enter_context(socket.create_connection(place)) for _ in range(8 + 64 + 40)]
            with contextlib.suppress(ConnectionError):
                assert many[-1].recv(100) == b""
            many[0].setblocking(False)
            with pytest.raises(BlockingIOError):
                many[0].recv(100)
        wait_until(ask_health, "the others to be forgotten")
        assert gateway.stop() == 0


def test_no_part_of_an_answer_waits_for_an_acknowledgement() -> None:
    with Listening(argparse.Namespace(address="127.0.0.1:0", max_connections=1)) as server:
        server.listen()
        with socket.create_connection(server.getsockname()), server.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_connections_without_a_request_are_closed(daemon: DaemonProcess) -> None:
    """Silent ones, those that send a header for ever, and those that ask no more; there are so many at most."""
    options = ("--idle-timeout", "2", "--max-connections", "8")
    with GatewayProcess(daemon.folder, *options, module="tensord_client.tesseract") as gateway:
        place = ("127.0.0.1", gateway.port)
        with contextlib.ExitStack() as opened:
            silent, endless, asked = (opened.enter_context(socket.create_connection(place)) for _ in range(3))
            asked.sendall(b"GET /rows/health HTTP/1.1\r\nHost: here\r\n\r\n")
            assert asked.recv(100).startswith(b"HTTP/1.1 200")
            endless.sendall(b"GET /rows/health HTTP/1.1\r\nHost: here\r\nEver: ")
            wait_until(lambda: not sent(endless, b"x"), "the header to end")
            for each in (silent, asked):
                each.settimeout(PATIENCE)
                with contextlib.suppress(ConnectionError):
                    while each.recv(1000):
                        pass
        with contextlib.ExitStack() as opened:

            def refused() -> bool:
                """Asks on the first of too many connections; False where opening them took so long that some were closed."""
                many = [opened.enter_context(socket.create_connection(place)) for _ in range(8 + 64 + 40)]
                answers = []
                for each in (many[0], many[-1]):
                    answers.append(b"")
                    with contextlib.suppress(ConnectionError):
                        each.sendall(b"GET /rows/health HTTP/1.1\r\nHost: here\r\n\r\n")
                        answers[-1] = each.recv(100)
                opened.close()
                return answers[0].startswith(b"HTTP/1.1 503") and answers[1] == b""

            wait_until(refused, "a connection too many to be refused")
        wait_until(lambda: healthy(gateway), "the others to be forgotten")
        assert gateway.stop() == 0
    assert "Traceback" not in gateway.log


def sent(connection: socket.socket, data: bytes) -> bool:
    """Sends it; returns False if the connection was closed."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(data)
        return True
    return False


def healthy(gateway: GatewayProcess) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return ask(gateway, "/rows/apply", {"inputs": ROW})[0] == 200
    return False


def test_answers_that_nobody_reads_are_held_for_a_while(daemon: DaemonProcess) -> None:
    """Their bytes count as those of requests; connections end."""
    options = ("--idle-timeout", "3", "--max-held-bytes", "30000000")
    with GatewayProcess(daemon.folder, *options, module="tensord_client.tesseract") as gateway:
        body = json.dumps({"inputs": {"x": encoded(np.ones(1, "f4"))}}).encode()
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", gateway.port))
            deaf.sendall(b"POST /wide/apply HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert deaf.recv(20).startswith(b"HTTP/1.1 200")
            status, answer = ask(gateway, "/wide/apply", body)
            assert (status, "bytes, at most 30000000 may be" in answer["detail"]) == (503, True), answer
            wait_until(lambda: ask(gateway, "/wide/apply", body)[0] == 200, "the answer to be given up")
        assert gateway.stop() == 0
