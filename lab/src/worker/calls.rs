//! System calls that have nothing to do with Firn: what do they cost where its library is loaded?

use std::fs::File;
use std::io::{Read, Write};

use serde::{Deserialize, Serialize};

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    /// write(2) of one byte to /dev/null.
    Write,
    /// read(2) of nothing from /dev/null.
    Read,
}

impl Call {
    pub(super) fn run(self, count: u64, buffer: &mut [u8]) -> anyhow::Result<()> {
        let mut null = File::options().read(true).write(true).open("/dev/null")?;
        for _ in 0..count {
            let done = match self {
                Self::Write => null.write(buffer)?,
                Self::Read => null.read(buffer)?,
            };
            std::hint::black_box(done);
        }
        Ok(())
    }
}
