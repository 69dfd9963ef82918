# Licensed under either of Apache-2.0 or MIT, as Firn is.

import os

from spack.package import *

try:
    # Where Spack 1.0 and newer have it.
    from spack_repo.builtin.build_systems.generic import Package
except ImportError:
    pass


class Firn(Package):
    """File system for checkpoints. Programs write them at memory speed; what they wrote survives the death of every
    process on the host and reaches a directory as ordinary files, in few large writes."""

    maintainers = []
    license("Apache-2.0 OR MIT")

    # Without an address: `spack dev-build` takes the source from the current directory.
    version("0.1.0")

    variant("bench", default=False, description="Benchmarks: firn bench")

    depends_on("c", type="build")
    depends_on("rust@1.95:", type="build")
    # mount(8) and ordinary users reach FUSE by fusermount3, which must be set-user-ID: that of the system is.
    conflicts("platform=darwin", msg="Firn needs Linux")

    def install(self, spec, prefix):
        cargo = which("cargo", required=True)
        packages = ["firn", "firn-preload", "firn-c"]
        if spec.satisfies("+bench"):
            packages.append("firn-bench")
        for package in packages:
            cargo("build", "--locked", "--profile", "dist", "--jobs", str(make_jobs), "--package", package)
        install = Executable(join_path("scripts", "install"))
        options = ["--prefix", str(prefix), "--from", os.path.join("target", "dist"), "--no-uninstall"]
        if spec.satisfies("+bench"):
            options.append("--bench")
        install(*options)

    def setup_run_environment(self, env):
        # A link for mount(8) in /sbin is the administrator's to make; `firn mount` needs none.
        env.prepend_path("LD_LIBRARY_PATH", self.prefix.lib)

    @run_after("install")
    @on_package_attributes(run_tests=True)
    def check_install(self):
        Executable(self.prefix.bin.firn)("version")
