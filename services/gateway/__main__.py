"""`python -m services.gateway`: one gateway process, configured by `PAGEWIRE_*` variables."""

import asyncio
import logging
import sys

import uvloop
from pydantic import ValidationError

from services.gateway.server import GatewayServer, HideCutBodies
from services.gateway.settings import Settings
from services.gateway.text.tokenizer import TextTokenizer
from shared import fault_points
from shared.errors import ConfigError
from shared.start_up import freeze_objects

SWITCH_S = 0.0005

logger = logging.getLogger(__name__)


def main() -> int:
    """Read the settings, serve, answer the exit code."""
    try:
        settings = Settings()
    except ValidationError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2
    fault_points.arm(settings.fault_dir)
    # The loop waits for the interpreter's lock behind the text threads: no longer than this.
    sys.setswitchinterval(SWITCH_S)
    form = "%(asctime)s %(levelname)s %(name)s %(message)s"
    logging.basicConfig(level=settings.log_level.upper(), format=form, stream=sys.stderr)
    logging.getLogger("uvicorn.error").addFilter(HideCutBodies())
    try:
        tokenizer = TextTokenizer.from_folder(settings.model)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            server = GatewayServer(settings, tokenizer)
            logger.info("%d objects frozen", freeze_objects())
            return runner.run(server.run_until_signal())
    except ConfigError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
