//! How large the indexes of logs are, by the pattern in which the clients write.

use std::fs::File;
use std::path::Path;

use anyhow::Context;

use super::host_name;
use crate::worker::{self, Blocks, Pattern, Task};
use firn_bench::firn::Firn;
use firn_bench::report::{Limit, Report, Sample};

const NAME: &str = "shared";
const BLOCK_BYTES: u64 = 512;
/// A cube, as [`Pattern::Cube`] needs.
const CLIENTS: u64 = 8;
/// The goal for strided writes.
const STRIDED_BYTES_MAX: f64 = 1024.0;

const PATTERNS: [(Pattern, &str); 4] = [
    (Pattern::Strided, "strided"),
    (Pattern::Segmented, "segmented"),
    (Pattern::Cube, "cube cut in three directions"),
    (Pattern::Irregular, "irregular"),
];

/// Writes a file of each pattern, with `pieces` pieces of each client, in `dir`, which is empty again afterwards.
pub fn measure(report: &mut Report, dir: &Path, firn: &Firn, pieces: u64) -> anyhow::Result<()> {
    let mut candidates = Vec::new();
    for (pattern, name) in PATTERNS {
        let bytes = index_bytes(pattern, dir, firn, pieces)?;
        if pattern == Pattern::Strided {
            let name = format!("index of {pieces} strided pieces, bytes a client");
            report.judge(name, Limit::Most(STRIDED_BYTES_MAX), &[bytes]);
        }
        let sample: Sample = vec![
            ("index", "B a client", bytes),
            ("index of a piece", "B", bytes / pieces as f64),
        ];
        candidates.push((name.to_owned(), vec![sample]));
    }
    report.add(
        format!("index: {pieces} pieces of {BLOCK_BYTES} B a client, {CLIENTS} clients one after the other"),
        candidates,
    );
    Ok(())
}

/// Bytes of index for each client. The clients write one after the other: only the order of a client's own pieces counts.
fn index_bytes(pattern: Pattern, dir: &Path, firn: &Firn, pieces: u64) -> anyhow::Result<f64> {
    let backing = dir.join("backing");
    let point = dir.join("mount");
    std::fs::create_dir_all(&backing)?;
    File::create(backing.join(NAME))?;
    for client in 0..CLIENTS {
        let host = host_name(client as u32);
        let options = format!("arena-size=128M,layout=log,flatten=off,host={host}");
        let mount = firn.mount(&backing, &point, &options)?;
        let task = Task::Blocks(Blocks {
            path: mount.path().join(NAME),
            pattern,
            block_bytes: BLOCK_BYTES,
            count: pieces,
            clients: CLIENTS,
            client,
            write: true,
        });
        worker::run_with(Some(&firn.preload()?), &[task])?;
    }
    let bytes = bytes_of_indexes(&backing.join(".firn/log"))?;
    std::fs::remove_dir_all(&backing)?;
    Ok(bytes as f64 / CLIENTS as f64)
}

/// Bytes of all indexes at or below `dir`.
fn bytes_of_indexes(dir: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    let list = |dir: &Path| {
        std::fs::read_dir(dir).with_context(|| format!("there are no logs in {}", dir.display()))
    };
    for entry in list(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            bytes += bytes_of_indexes(&entry.path())?;
        } else if entry.file_name().to_string_lossy().starts_with("i-") {
            bytes += entry.metadata()?.len();
        }
    }
    Ok(bytes)
}
