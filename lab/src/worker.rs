//! What the worker processes of the laboratory do beside the tasks of `firn bench`.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use firn_bench::worker::{Job, Work, make_buffer};
use serde::{Deserialize, Serialize};

mod blocks;
mod calls;
mod paced;
mod striped;

pub use blocks::{Blocks, Pattern};
pub use calls::Call;
pub use firn_bench::worker::{Outcome, elapsed_s, run_together, run_with};
pub use paced::Paced;
pub use striped::Striped;

/// What a worker does.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "task")]
pub enum Task {
    /// Writes at a rate of its own.
    Paced(Paced),
    /// One write(2) to `path`, which is opened before: what the first one of a process costs.
    FirstWrite {
        /// The file.
        path: PathBuf,
        /// Bytes of the write.
        bytes: u64,
    },
    /// System calls on descriptors that are no file of Firn's.
    Calls {
        /// Which.
        call: Call,
        /// How many.
        count: u64,
    },
    /// Writes or reads one client's blocks of a file that many clients share.
    Blocks(Blocks),
    /// Writes or reads a file that is striped over several directories.
    Striped(Striped),
    /// A task of `firn bench`.
    #[serde(untagged)]
    Usual(firn_bench::worker::Task),
}

impl Work for Task {
    fn prepare(self) -> anyhow::Result<Box<dyn Job>> {
        let bytes = match &self {
            Self::Usual(_) => 0,
            Self::Paced(paced) => paced.request_bytes,
            Self::FirstWrite { bytes, .. } => *bytes,
            Self::Calls { .. } => 1,
            Self::Blocks(blocks) => blocks.block_bytes,
            Self::Striped(striped) => striped.request_bytes,
        };
        let buffer = make_buffer(bytes);
        let run = match self {
            Self::Usual(task) => return task.prepare(),
            Self::Paced(paced) => Run::Paced(paced),
            Self::FirstWrite { path, .. } => {
                let file = File::create(&path);
                Run::FirstWrite(file.with_context(|| format!("cannot create {}", path.display()))?)
            }
            Self::Calls { call, count } => Run::Calls(call, count),
            Self::Blocks(blocks) => {
                let offsets = blocks.offsets();
                Run::Blocks(blocks, offsets)
            }
            Self::Striped(striped) => Run::Striped(striped),
        };
        Ok(Box::new(Prepared { run, buffer }))
    }
}

/// A task with its memory and its open file.
struct Prepared {
    run: Run,
    buffer: Vec<u8>,
}

enum Run {
    Paced(Paced),
    FirstWrite(File),
    Calls(Call, u64),
    /// And where they are.
    Blocks(Blocks, Vec<u64>),
    Striped(Striped),
}

impl Job for Prepared {
    fn run(&mut self) -> anyhow::Result<()> {
        let buffer = &mut self.buffer;
        match &mut self.run {
            Run::Paced(paced) => paced.run(buffer),
            Run::FirstWrite(file) => Ok(file.write_all(buffer)?),
            Run::Calls(call, count) => call.run(*count, buffer),
            Run::Blocks(blocks, offsets) => blocks.run(offsets, buffer),
            Run::Striped(striped) => striped.run(buffer),
        }
    }
}
