//! What many small files take, and how much of an arena is not data.

use std::os::unix::fs::MetadataExt;

use firn_format::geometry::Geometry;

use firn_bench::firn::Firn;
use firn_bench::options::WorkDir;
use firn_bench::report::{Limit, Report};
use firn_bench::worker::{self, Operation, Task};
use firn_config::size_text;

const MIB: f64 = (1u64 << 20) as f64;
const FILE_BYTES: u64 = 4096;
const ARENA_BYTES: u64 = 1 << 30;
const CHUNK_BYTES: u64 = 4 << 20;
/// Of firnd and of an arena, beside what files take.
const FIXED_MIB: f64 = 64.0;

/// Adds a case: `count` files of 4 KiB.
pub fn measure(count: u64, firn: &Firn, work: &WorkDir, report: &mut Report) -> anyhow::Result<()> {
    let options = format!(
        "drain=demand,close=held,fsync=held,chunk-size={CHUNK_BYTES},arena-size={ARENA_BYTES}"
    );
    let backing = work.subdir("small.b")?;
    let point = work.subdir("small")?;
    let mount = firn.mount(&backing, &point, &options)?;
    let dir = mount.path().join("checkpoint");
    std::fs::create_dir(&dir)?;
    // All slots and tables are there from the beginning; what counts is what files take: slabs, the tables of
    // their chunks, the journal.
    let geometry = Geometry::new(ARENA_BYTES, CHUNK_BYTES)?;
    let arena = mount.arena()?;
    let metadata = || anyhow::Ok(std::fs::metadata(&arena)?.blocks() * 512 - ARENA_BYTES);
    let used = || -> anyhow::Result<(f64, f64)> {
        let slabs = mount.number("arena_used_bytes")?;
        let tables = |chunks: u64| chunks * geometry.table_bytes();
        let journal = metadata()? - tables(u64::from(geometry.chunks()));
        let arena = slabs + tables(slabs.div_ceil(CHUNK_BYTES)) + journal;
        Ok((arena as f64 / MIB, mount.private_bytes()? as f64 / MIB))
    };
    let percent = |metadata: u64| metadata as f64 / ARENA_BYTES as f64 * 100.0;
    let fresh_percent = percent(metadata()?);
    let before = used()?;
    worker::run_all(&[Task::Names {
        dir: dir.clone(),
        count,
        operation: Operation::Create,
    }])?;
    let after = used()?;
    let data_mib = (count * FILE_BYTES) as f64 / MIB;
    let row = |(arena, firnd): (f64, f64)| {
        vec![vec![
            ("arena", "MiB", arena),
            ("firnd", "MiB", firnd),
            ("together", "MiB", arena + firnd),
        ]]
    };
    report.add(
        format!("{count} files of {} in memory", size_text(FILE_BYTES)),
        vec![
            ("their data".into(), row((data_mib, 0.0))),
            ("before them".into(), row(before)),
            ("with them".into(), row(after)),
        ],
    );
    let limit = 1.5 * data_mib + FIXED_MIB;
    let name = format!(
        "memory of {count} files of {}, firnd and arena [MiB]",
        size_text(FILE_BYTES)
    );
    report.judge(name, Limit::Most(limit.round()), &[after.0 + after.1]);
    report.judge(
        "fresh arena that is not data [%]",
        Limit::Most(1.0),
        &[fresh_percent],
    );
    let with_names = percent(metadata()?);
    report.notes.push(format!(
        "With {count} names {with_names:.2} % of the arena is not data."
    ));
    // Or they would be drained at the end.
    std::fs::remove_dir_all(&dir)?;
    mount.wait_empty()
}
