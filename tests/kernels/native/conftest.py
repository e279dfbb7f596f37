"""Where the native kernels are tested.

Their x86 code compiles, and its products were checked in an emulator; on such a processor it has not run yet, and an
instruction that it lacks would end the whole test run. FLYWEIGHT_TEST_NATIVE=1 runs the tests there.
"""

import os
import platform

untried = platform.machine() != "aarch64" and "FLYWEIGHT_TEST_NATIVE" not in os.environ
collect_ignore_glob = ["test_*.py"] if untried else []
