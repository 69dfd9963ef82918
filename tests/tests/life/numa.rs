//! NUMA nodes on a real mount, over topologies that this machine need not have.

use std::path::{Path, PathBuf};
use std::process::Command;

use firn_tests::sandbox::preload_library;
use firn_tests::{FirnMount, Sandbox, run};

const MIB: u64 = 1 << 20;
const CPUS: &str = "0-4095";

/// A description of two NUMA nodes of which NUMA node `near` has all CPUs.
fn two_numa_nodes(sandbox: &Sandbox, near: usize) -> PathBuf {
    let root = sandbox.mkdir(&format!("near{near}"));
    let write = |name: String, text: &str| std::fs::write(root.join(name), text).expect("write");
    write("online".into(), "0-1\n");
    for numa_node in 0..2 {
        std::fs::create_dir(root.join(format!("node{numa_node}"))).expect("mkdir");
        write(
            format!("node{numa_node}/cpulist"),
            if numa_node == near { CPUS } else { "\n" },
        );
        write(
            format!("node{numa_node}/distance"),
            ["10 21\n", "21 10\n"][numa_node],
        );
    }
    root
}

/// Writes zeros, a mebibyte at a time, and asserts that they took the way they should.
fn write_zeros(to: &Path, mebibytes: u64, preload: bool) {
    let script = "import os, sys; f = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
for _ in range(int(sys.argv[2])): assert os.write(f, bytes(1 << 20)) == 1 << 20";
    let mut command = Command::new("/usr/bin/python3");
    command
        .args(["-c", script])
        .arg(to)
        .arg(mebibytes.to_string());
    if preload {
        command
            .env("LD_PRELOAD", preload_library())
            .env("FIRN_PRELOAD_REPORT", "1");
    }
    let outcome = run(&mut command).ok();
    let all = format!("by direct access ({} bytes)", mebibytes * MIB);
    assert_eq!(outcome.stderr.contains(&all), preload, "{outcome}");
}

/// Proves S-numa-1, S-numa-2.
#[test]
fn writers_get_the_memory_of_their_node_first_and_that_of_others_then() {
    for preload in [false, true] {
        for near in [0, 1] {
            let sandbox = Sandbox::new("numa");
            let root = two_numa_nodes(&sandbox, near);
            let options = format!(
                "memory=16M,chunk-size=1M,drain=demand,numa-topology={}",
                root.display()
            );
            let mount = FirnMount::new(&sandbox, &options);
            write_zeros(&mount.join("a"), 5, preload);
            let numa_nodes = mount.status().numa_nodes;
            assert_eq!(
                numa_nodes
                    .iter()
                    .map(|n| (n.numa_node, n.bytes))
                    .collect::<Vec<_>>(),
                [(0, 8 * MIB), (1, 8 * MIB)]
            );
            assert!(numa_nodes[near].used_bytes >= 5 * MIB, "{numa_nodes:?}");
            assert_eq!(
                (
                    numa_nodes[1 - near].used_bytes,
                    numa_nodes[1 - near].foreign_slabs
                ),
                (0, 0)
            );
            write_zeros(&mount.join("b"), 7, preload);
            let numa_nodes = mount.status().numa_nodes;
            assert!(
                numa_nodes[1 - near].foreign_slabs > 0 && numa_nodes[near].foreign_slabs == 0,
                "{numa_nodes:?}"
            );
            assert!(numa_nodes[1 - near].used_bytes >= 4 * MIB, "{numa_nodes:?}");
            let text = sandbox
                .run([
                    "status".as_ref(),
                    "--verbose".as_ref(),
                    mount.path().as_os_str(),
                ])
                .ok()
                .stdout;
            assert_eq!(
                text.lines()
                    .filter(|line| line.contains("used from other NUMA nodes"))
                    .count(),
                2,
                "{text}"
            );
            for (name, mebibytes) in [("a", 5), ("b", 7)] {
                let bytes = std::fs::read(mount.join(name)).expect("read");
                assert!(
                    bytes.len() as u64 == mebibytes * MIB && bytes.iter().all(|byte| *byte == 0)
                );
            }
        }
    }
}

/// Proves S-numa-1.
#[test]
fn a_machine_without_numa_nodes_has_one() {
    let sandbox = Sandbox::new("numaone");
    let none = sandbox.mkdir("none");
    let mount = FirnMount::new(
        &sandbox,
        &format!("memory=16M,chunk-size=1M,numa-topology={}", none.display()),
    );
    let numa_nodes = mount.status().numa_nodes;
    assert_eq!(
        numa_nodes
            .iter()
            .map(|numa_node| numa_node.bytes)
            .collect::<Vec<_>>(),
        [16 * MIB]
    );
}
