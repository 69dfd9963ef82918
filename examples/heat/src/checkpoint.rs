//! Checkpoints on disk: one file a rank, and a marker that says that all of them are whole.
//!
//! The format is in `examples/heat/README.md`. Files are written with plain write(2) calls of very
//! different sizes and no buffering, as process images are: what becomes of such writes is the
//! business of the file system below.
//!
//! A directory counts only once `COMPLETE` has been renamed into place; it names each file with
//! its size and checksum, so a restart never trusts a file that a crash has cut short.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::IntoRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::crc32::{Crc32, crc32};
use crate::field::Slab;

const MAGIC: &[u8; 8] = b"HEATCKP1";
const KIND_HEAT: u32 = 1;
const KIND_FUEL: u32 = 2;
/// This much of each temperature plane goes out page by page, as a dumper of memory pages does.
const PAGED_BYTES: usize = 32 << 10;
const PAGE_BYTES: usize = 4 << 10;

/// Who wrote a file and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Counts from 0.
    pub rank: u32,
    /// How many there are.
    pub ranks: u32,
    /// Step of the fields.
    pub step: u64,
}

/// One file of a checkpoint, and what writing it cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Bytes of the file.
    pub bytes: u64,
    /// CRC-32 of the file.
    pub crc: u32,
    /// write(2) calls.
    pub writes: u64,
    /// Time inside open, write, fsync and close.
    pub in_calls: Duration,
}

/// Directory of the checkpoint of `step`.
pub fn step_dir(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!("step_{step:06}"))
}

fn rank_file(dir: &Path, stamp: Stamp) -> PathBuf {
    step_dir(dir, stamp.step).join(format!("rank_{:04}.ckpt", stamp.rank))
}

/// A file being written: counts calls, time and checksum.
struct Out {
    file: File,
    crc: Crc32,
    saved: Saved,
}

impl Out {
    fn create(path: &Path) -> std::io::Result<Out> {
        let begin = Instant::now();
        let file = File::create(path)?;
        let saved = Saved {
            bytes: 0,
            crc: 0,
            writes: 0,
            in_calls: begin.elapsed(),
        };
        Ok(Out {
            file,
            crc: Crc32::new(),
            saved,
        })
    }

    fn put(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.crc.update(bytes);
        let begin = Instant::now();
        self.file.write_all(bytes)?;
        self.saved.in_calls += begin.elapsed();
        self.saved.writes += 1;
        self.saved.bytes += bytes.len() as u64;
        Ok(())
    }

    fn head(&mut self, kind: u32, plane: usize, data: &[u8]) -> std::io::Result<()> {
        self.put(&kind.to_le_bytes())?;
        self.put(&(plane as u32).to_le_bytes())?;
        self.put(&(data.len() as u64).to_le_bytes())?;
        self.put(&crc32(data).to_le_bytes())
    }

    fn finish(mut self, fsync: bool) -> std::io::Result<Saved> {
        let crc = self.crc.value();
        self.put(&crc.to_le_bytes())?;
        let begin = Instant::now();
        if fsync {
            self.file.sync_all()?;
        }
        close(self.file)?;
        self.saved.in_calls += begin.elapsed();
        self.saved.crc = self.crc.value();
        Ok(self.saved)
    }
}

/// Closes and listens to the answer: file systems that write late (NFS, quota, Firn) tell errors
/// there, and dropping a [`File`] throws them away.
fn close(file: File) -> std::io::Result<()> {
    // SAFETY: into_raw_fd gave up the ownership, so nobody else closes or uses the descriptor.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Writes the file of one rank.
pub fn save(dir: &Path, stamp: Stamp, slab: &Slab, fsync: bool) -> Result<Saved, String> {
    let path = rank_file(dir, stamp);
    let written = || -> std::io::Result<Saved> {
        fs::create_dir_all(step_dir(dir, stamp.step))?;
        let mut out = Out::create(&path)?;
        out.put(MAGIC)?;
        for number in [
            stamp.rank,
            stamp.ranks,
            slab.size as u32,
            slab.planes as u32,
        ] {
            out.put(&number.to_le_bytes())?;
        }
        out.put(&stamp.step.to_le_bytes())?;
        for plane in 0..slab.planes {
            let data = to_bytes(&slab.heat[slab.plane(plane)]);
            out.head(KIND_HEAT, slab.first + plane, &data)?;
            let (paged, rest) = data.split_at(PAGED_BYTES.min(data.len()));
            for page in paged.chunks(PAGE_BYTES) {
                out.put(page)?;
            }
            if !rest.is_empty() {
                out.put(rest)?;
            }
        }
        let all = slab.plane(0).start..slab.plane(slab.planes - 1).end;
        let data = to_bytes(&slab.fuel[all]);
        out.head(KIND_FUEL, slab.first, &data)?;
        out.put(&data)?;
        out.finish(fsync)
    };
    written().map_err(|error| format!("{}: {error}", path.display()))
}

/// Reads the file of one rank into `slab`, checking everything on the way.
pub fn load(dir: &Path, stamp: Stamp, slab: &mut Slab) -> Result<(), String> {
    let path = rank_file(dir, stamp);
    let bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    parse(&bytes, stamp, slab).map_err(|what| {
        format!(
            "{}: {what}; restart from an older checkpoint by removing this one",
            path.display()
        )
    })
}

fn parse(bytes: &[u8], stamp: Stamp, slab: &mut Slab) -> Result<(), String> {
    let (body, sum) = bytes
        .split_last_chunk::<4>()
        .ok_or("shorter than its checksum")?;
    if crc32(body) != u32::from_le_bytes(*sum) {
        return Err("checksum of the file is wrong".into());
    }
    let mut rest = body;
    if take::<8>(&mut rest)? != *MAGIC {
        return Err("not a checkpoint of this solver".into());
    }
    for (name, expected) in [
        ("rank", stamp.rank),
        ("ranks", stamp.ranks),
        ("size", slab.size as u32),
        ("planes", slab.planes as u32),
    ] {
        let found = u32::from_le_bytes(take(&mut rest)?);
        if found != expected {
            return Err(format!("{name} is {found}, this run has {expected}"));
        }
    }
    if u64::from_le_bytes(take(&mut rest)?) != stamp.step {
        return Err("it is of another step".into());
    }
    for plane in 0..slab.planes {
        let range = slab.plane(plane);
        record(
            &mut rest,
            KIND_HEAT,
            slab.first + plane,
            &mut slab.heat[range],
        )?;
    }
    let all = slab.plane(0).start..slab.plane(slab.planes - 1).end;
    record(&mut rest, KIND_FUEL, slab.first, &mut slab.fuel[all])
}

fn record(rest: &mut &[u8], kind: u32, plane: usize, into: &mut [f64]) -> Result<(), String> {
    let found = (
        u32::from_le_bytes(take(rest)?),
        u32::from_le_bytes(take(rest)?) as usize,
    );
    let len = u64::from_le_bytes(take(rest)?) as usize;
    let sum = u32::from_le_bytes(take(rest)?);
    if found != (kind, plane) || len != into.len() * 8 || rest.len() < len {
        return Err(format!("record of plane {plane} is not where it belongs"));
    }
    let (data, behind) = rest.split_at(len);
    if crc32(data) != sum {
        return Err(format!("checksum of plane {plane} is wrong"));
    }
    for (cell, bytes) in into.iter_mut().zip(data.as_chunks::<8>().0) {
        *cell = f64::from_le_bytes(*bytes);
    }
    *rest = behind;
    Ok(())
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], String> {
    let (head, behind) = rest.split_first_chunk::<N>().ok_or("it ends too early")?;
    *rest = behind;
    Ok(*head)
}

fn to_bytes(cells: &[f64]) -> Vec<u8> {
    cells.iter().flat_map(|cell| cell.to_le_bytes()).collect()
}

/// Declares the checkpoint of `step` whole: `files` has one entry a rank, in order.
pub fn complete(dir: &Path, step: u64, files: &[Saved], fsync: bool) -> Result<(), String> {
    let here = step_dir(dir, step);
    let lines: String = files
        .iter()
        .enumerate()
        .map(|(rank, file)| format!("rank_{rank:04}.ckpt {} {:08x}\n", file.bytes, file.crc))
        .collect();
    let written = || -> std::io::Result<()> {
        let mut file = File::create(here.join("COMPLETE.tmp"))?;
        file.write_all(lines.as_bytes())?;
        if fsync {
            file.sync_all()?;
        }
        close(file)?;
        fs::rename(here.join("COMPLETE.tmp"), here.join("COMPLETE"))?;
        if fsync {
            File::open(&here)?.sync_all()?;
            File::open(dir)?.sync_all()?;
        }
        Ok(())
    };
    written().map_err(|error| format!("{}: {error}", here.display()))
}

/// Steps of all complete checkpoints in `dir`, oldest first; an absent directory has none.
pub fn completed(dir: &Path) -> Result<Vec<u64>, String> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(format!("{}: {error}", dir.display())),
    };
    let mut steps: Vec<u64> = entries
        .filter_map(|entry| {
            entry
                .ok()?
                .file_name()
                .to_str()?
                .strip_prefix("step_")?
                .parse()
                .ok()
        })
        .filter(|&step| step_dir(dir, step).join("COMPLETE").exists())
        .collect();
    steps.sort_unstable();
    Ok(steps)
}

/// Compares every file of the checkpoint of `step` with what its marker says; returns the ranks.
pub fn verify(dir: &Path, step: u64) -> Result<u32, String> {
    let here = step_dir(dir, step);
    let marker = fs::read_to_string(here.join("COMPLETE"))
        .map_err(|error| format!("{}/COMPLETE: {error}", here.display()))?;
    for line in marker.lines() {
        let [name, bytes, sum] = line.split(' ').collect::<Vec<_>>()[..] else {
            return Err(format!(
                "{}/COMPLETE: cannot read the line {line:?}",
                here.display()
            ));
        };
        let data = fs::read(here.join(name))
            .map_err(|error| format!("{}/{name}: {error}", here.display()))?;
        if data.len().to_string() != bytes || format!("{:08x}", crc32(&data)) != sum {
            return Err(format!(
                "{}/{name} is not what COMPLETE says",
                here.display()
            ));
        }
    }
    match marker.lines().count() as u32 {
        0 => Err(format!("{}/COMPLETE is empty", here.display())),
        ranks => Ok(ranks),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written() -> (Slab, Stamp, Vec<u8>) {
        let dir = std::env::temp_dir().join(format!(
            "heat-test-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        let stamp = Stamp {
            rank: 1,
            ranks: 3,
            step: 7,
        };
        let slab = Slab::new(1, 3, 10);
        let saved = save(&dir, stamp, &slab, false).unwrap();
        let bytes = fs::read(rank_file(&dir, stamp)).unwrap();
        complete(&dir, 7, &[], false).unwrap();
        assert_eq!(completed(&dir).unwrap(), [7]);
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(
            (saved.bytes, saved.crc),
            (bytes.len() as u64, crc32(&bytes))
        );
        (slab, stamp, bytes)
    }

    #[test]
    fn a_checkpoint_comes_back_bit_for_bit() {
        let (slab, stamp, bytes) = written();
        let mut back = Slab::new(1, 3, 10);
        back.heat.fill(-1.0);
        back.fuel.fill(-1.0);
        parse(&bytes, stamp, &mut back).unwrap();
        for plane in 0..slab.planes {
            assert_eq!(slab.plane_hash(plane), back.plane_hash(plane));
        }
    }

    #[test]
    fn no_cut_and_no_flipped_byte_is_taken_for_a_checkpoint() {
        let (_, stamp, bytes) = written();
        let mut back = Slab::new(1, 3, 10);
        for cut in (0..bytes.len()).step_by(97) {
            assert!(
                parse(&bytes[..cut], stamp, &mut back).is_err(),
                "cut at {cut}"
            );
            let mut flipped = bytes.clone();
            flipped[cut] ^= 1;
            assert!(
                parse(&flipped, stamp, &mut back).is_err(),
                "flipped at {cut}"
            );
        }
    }
}
