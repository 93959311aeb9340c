"""A headless Chromium, driven over the pipe of its DevTools protocol: real clicks and keys, and what the page then shows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from base64 import b64decode
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
KEYS = {"Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}


class Browser:
    """One browser with one tab. Use it in `with`."""

    def __init__(self, width: int = 1440, height: int = 900) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        own = f"--headless --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={self._profile.name}"
        size = f"--window-size={width},{height} --hide-scrollbars --no-first-run --disable-dev-shm-usage"
        size += " --disable-features=IsolateSandboxedIframes"  # so that frames can be read too
        # the protocol's pipes are the file descriptors 3 and 4
        command = f'exec "$0" {own} {size} about:blank 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, str(CHROMIUM)],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest, self.events = 0, b"", list[dict[str, Any]]()
        self._session: str | None = None
        target = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._write)
        os.close(self._read)
        for _ in range(50):  # processes of the browser may still write there
            try:
                self._profile.cleanup()
                return
            except OSError:
                time.sleep(0.1)

    def call(self, method: str, **parameters: Any) -> Any:
        """A command of the protocol, and its result; events that arrive meanwhile are kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._read, 1 << 16)
            if not read:
                raise RuntimeError("the browser has ended")
            self._rest += read
        message, self._rest = self._rest.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, path: Path, address: str = "") -> None:
        """Load a file, and wait until it has drawn itself."""
        self.events.clear()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"{path.resolve().as_uri()}{address}")
        self.wait('document.readyState === "complete" && location.protocol === "file:"')

    def ask(self, expression: str, frame: str | None = None) -> Any:
        """The value of an expression in the page, or in one of its frames."""
        where = {} if frame is None else {"contextId": self.call("Page.createIsolatedWorld", frameId=frame)["executionContextId"]}
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, **where)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 20) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.ask(f"Boolean({expression})"):
            assert time.monotonic() < end, f"never true: {expression}\n{self.problems()}"
            time.sleep(0.02)

    def frames(self) -> list[str]:
        """The frames of the page."""
        return [child["frame"]["id"] for child in self.call("Page.getFrameTree")["frameTree"].get("childFrames", ())]

    def text(self, selector: str) -> str:
        """What the first element that fits shows; "" if none does."""
        return str(self.ask(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def texts(self, selector: str) -> list[str]:
        return list(self.ask(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText)"))

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of the first element that fits."""
        box = self.ask(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)}); if (!one) return null;"
            " one.scrollIntoView({block: 'center', behavior: 'instant'}); const box = one.getClientRects()[0];"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        assert box, f"nothing is {selector}"
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            pressed = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], **pressed)

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def key(self, name: str) -> None:
        """Press and release a key: a character, or one of KEYS."""
        code = {"windowsVirtualKeyCode": KEYS[name]} if name in KEYS else {"text": name}
        text = {"text": "\r"} if name == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name)

    def prefers(self, scheme: str) -> None:
        """What the system asks for: "light" or "dark"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def problems(self) -> list[str]:
        """Exceptions, errors on the console, and refused requests since the page was opened."""
        found = []
        for event in self.events:
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    details = event["params"]["exceptionDetails"]
                    found.append(str(details.get("exception", details).get("description", details)))
                case "Log.entryAdded" if event["params"]["entry"]["level"] == "error":
                    found.append(event["params"]["entry"]["text"])
                case "Runtime.consoleAPICalled" if event["params"]["type"] == "error":
                    found.append(str(event["params"]["args"]))
        return found

    def requests(self) -> list[str]:
        """Everything that was asked of a network or a disk since the page was opened, the page itself too."""
        return [event["params"]["request"]["url"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
