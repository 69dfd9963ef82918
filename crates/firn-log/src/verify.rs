//! Verifies containers for `firn check`: reads all of each container, and reports what is wrong. Changes nothing.
//!
//! Terms
//! * A *container* is a directory with the logs and indexes of all hosts, for one file.
//! * A *log* has bytes that one host wrote. An *index* lists them, and each entry is a *frame*.
//! * A *table* is a part of an index, sorted by offset in the file.
//! * The *head* names the file of the container. The *seal* says how many bytes of each index count.
//!
//! What is checked: the owner of each file, `head` and seal, all frames of all indexes, all blocks of logs by their
//! checksums, and all tables. Hosts may work meanwhile. So a container that is gone at the end of its check is left out
//! of the result.

use std::ffi::OsStr;
use std::fmt;

use firn_backing::{Access, Backing, Errno, Result};
use firn_hosts::own::{self, TOP};
use firn_hosts::{OwnError, VoteDir};

use crate::backing::CONTAINERS;
use crate::file_dir;
use crate::file_id::FileId;
use crate::frame::{CHECKED_BYTES, Change, DecodedFrame, Frame, Written};
use crate::head::{self, HEAD, HeadError, HeadState};
use crate::index_reader::{INDEX_READ_BYTES, has_synced_frame_after, read_exact};
use crate::names::Writer;
use crate::orphans::{self, DEAD, DYING, NamedContainer};
use crate::seal::{SEAL_NAME, Seal};
use crate::table::{Table, TableError, TableResult};

/// One fault of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Name of the container in `.firn/log/`.
    pub container: String,
    /// Name of the faulty file in it; `None` if the fault concerns the whole container.
    pub file: Option<String>,
    /// The host that wrote the file.
    pub host: Option<String>,
    /// Position of the fault in the file.
    pub offset: Option<u64>,
    /// The kind of fault.
    pub fault: Fault,
}

/// The kinds of faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Another user may have written the file.
    Distrusted(String),
    /// The head cannot be read, so the container cannot be opened.
    Head(HeadError),
    /// A call of the backing failed: the storage is damaged, or a lane cannot be reached.
    Failed(Errno),
    /// The seal cannot be read.
    Seal,
    /// A synced frame of an index is damaged. The file cannot be read.
    Index,
    /// An index is gone, although the seal counts bytes of it. Reads of the part that is in no table fail.
    Missing,
    /// The bytes at the end of an index are no frame: a host died while it appended, or unsynced bytes were lost.
    Torn,
    /// Bytes of a log differ from their checksum. Reads of these bytes fail.
    Data,
    /// A table is damaged. Readers use the index instead.
    Sorted,
    /// A host began to remove the container, and may have died since.
    Unfinished,
}

impl Fault {
    /// Returns whether all bytes that were written and synced can still be read.
    pub fn is_harmless(&self) -> bool {
        matches!(self, Self::Torn | Self::Sorted | Self::Unfinished)
    }
}

impl Finding {
    /// Returns the finding about a container whose creation was not finished.
    fn unfinished(container: String) -> Self {
        Self {
            container,
            file: None,
            host: None,
            offset: None,
            fault: Fault::Unfinished,
        }
    }

    fn distrusted(container: String, why: &OwnError) -> Self {
        Self {
            fault: Fault::Distrusted(why.to_string()),
            ..Self::unfinished(container)
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "container {}", self.container)?;
        if let Some(file) = &self.file {
            write!(f, ", file {file}")?;
        }
        if let Some(host) = &self.host {
            write!(f, " of host {host}")?;
        }
        if let Some(offset) = self.offset {
            write!(f, ", offset {offset}")?;
        }
        write!(f, ": {}", self.fault)
    }
}

impl fmt::Display for Fault {
    /// Writes what is wrong, what follows from it for reads of the file, and what to do if there is something to do.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Distrusted(why) => write!(f, "{why}"),
            Self::Head(error) => write!(f, "{error}"),
            Self::Failed(error) => write!(
                f,
                "cannot be read ({error}); reads of the logged file fail too: check whether its lane is reachable"
            ),
            Self::Seal => write!(
                f,
                "the seal is damaged: reads of the logged file fail with EIO"
            ),
            Self::Index => write!(
                f,
                "an entry of the index is damaged: reads of the logged file fail with EIO"
            ),
            Self::Missing => write!(
                f,
                "the index is missing: reads of the logged file fail with EIO, unless sorted indexes have all its changes"
            ),
            Self::Torn => write!(
                f,
                "no valid entry from here on: a host died while it appended, or unsynced bytes were lost"
            ),
            Self::Data => write!(
                f,
                "the bytes are missing or differ from their checksum: reads of them fail with EIO"
            ),
            Self::Sorted => write!(
                f,
                "the sorted index is damaged: the unsorted index is read instead"
            ),
            Self::Unfinished => write!(
                f,
                "its file was removed or flattened, and these logs are left: a live host, the next mount, `firn \
                 recover` or `firn flatten --backing` removes them"
            ),
        }
    }
}

/// The result of verifying all containers in a backing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Number of containers.
    pub containers: usize,
    /// All faults that were found.
    pub findings: Vec<Finding>,
}

/// Verifies all containers (directories with logs) in a backing. A container that is flattened and removed meanwhile is
/// not counted.
pub fn verify<B: Backing>(backing: &B) -> Result<Verified> {
    let mut verified = Verified::default();
    let Some((firn, _)) = own::find_dir(backing, &backing.root(), TOP)? else {
        return Ok(verified);
    };
    let Some((containers_dir, _)) = own::find_dir(backing, &firn, CONTAINERS)? else {
        return Ok(verified);
    };
    let mut dying = Vec::new();
    for file in file_dir::list_files(backing, &containers_dir)? {
        verify_file(backing, &containers_dir, file, &mut verified, &mut dying)?;
    }
    // A file whose removal was announced may still have its name. Only a missing file makes its containers unfinished.
    let removed = orphans::search_files(backing, dying)?.missing;
    let unfinished = removed.into_iter().map(Finding::unfinished);
    verified.findings.extend(unfinished);
    Ok(verified)
}

/// Verifies the containers (directories with logs) of one file. If a host is removing the file, adds its containers to
/// `dying`.
fn verify_file<B: Backing>(
    backing: &B,
    containers_dir: &B::Inode,
    file: FileId,
    verified: &mut Verified,
    dying: &mut Vec<NamedContainer>,
) -> Result<()> {
    let dir = match file_dir::find(backing, containers_dir, file) {
        Ok(Some(dir)) => dir,
        Ok(None) => return Ok(()),
        Err(OwnError::Backing(errno)) => return Err(errno),
        Err(error) => {
            verified.containers += 1;
            let distrusted = Finding::distrusted(file.dir_name(), &error);
            verified.findings.push(distrusted);
            return Ok(());
        }
    };
    for (name, ..) in own::list(backing, &dir)? {
        let container = String::from_utf8_lossy(&name).into_owned();
        match FileId::parse_container_name(&name) {
            Some((id, generation)) if id == file => {
                let verifier = Verifier {
                    backing,
                    dir: &dir,
                    container,
                    findings: Vec::new(),
                    is_dying: false,
                };
                verifier.verify_and_report(file, generation, verified, dying);
            }
            _ if VoteDir::<B>::is_retired(&container) => {
                verified.findings.push(Finding::unfinished(container));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Verifies one container.
struct Verifier<'a, B: Backing> {
    backing: &'a B,
    /// The directory of the file.
    dir: &'a B::Inode,
    container: String,
    findings: Vec<Finding>,
    /// Whether a host has announced that it removes the file.
    is_dying: bool,
}

/// An open log of a container.
struct OpenLog<B: Backing> {
    /// Number of the log among the writer's logs.
    number: u32,
    file: B::File,
}

/// A file of a container that is checked, and the host that wrote it.
struct CheckedFile<'a> {
    file: &'a str,
    host: Option<&'a str>,
}

impl<B: Backing> Verifier<'_, B> {
    /// Verifies the container (directory with logs), and adds the result to `verified`, the results for all containers.
    /// If a host has announced that it removes the file, also adds the container to `dying`. A container that is
    /// removed meanwhile adds nothing.
    fn verify_and_report(
        mut self,
        file: FileId,
        generation: u32,
        verified: &mut Verified,
        dying: &mut Vec<NamedContainer>,
    ) {
        let outcome = self.verify(file, generation);
        let lookup = self.backing.lookup(self.dir, OsStr::new(&self.container));
        if lookup.err() == Some(Errno::NOENT) {
            // What is found in a container that was removed meanwhile has no meaning.
            return;
        }
        if let Err(errno) = outcome {
            self.add_finding(None, None, Fault::Failed(errno));
        }
        verified.containers += 1;
        verified.findings.append(&mut self.findings);
        if self.is_dying {
            dying.push(NamedContainer {
                file,
                name: self.container,
            });
        }
    }

    /// Adds a finding about `checked_file`, or about the whole container.
    fn add_finding(
        &mut self,
        checked_file: Option<&CheckedFile<'_>>,
        offset: Option<u64>,
        fault: Fault,
    ) {
        self.findings.push(Finding {
            container: self.container.clone(),
            file: checked_file.map(|checked_file| checked_file.file.to_owned()),
            host: checked_file.and_then(|checked_file| checked_file.host.map(str::to_owned)),
            offset,
            fault,
        });
    }

    /// Returns the result of a look-up. If the object is not trustworthy, adds a finding and returns `None`.
    fn accept_trusted<T>(
        &mut self,
        checked_file: Option<&CheckedFile<'_>>,
        result: std::result::Result<T, OwnError>,
    ) -> Result<Option<T>> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(OwnError::Backing(errno)) => Err(errno),
            Err(error) => {
                self.add_finding(checked_file, None, Fault::Distrusted(error.to_string()));
                Ok(None)
            }
        }
    }

    /// Verifies the container (directory with logs) as that of `file` and `generation`: its head, seal, indexes and
    /// tables. Faults are added to the findings. Fails only if the backing fails.
    fn verify(&mut self, file: FileId, generation: u32) -> Result<()> {
        let lookup = VoteDir::find(self.backing, self.dir, &self.container, "");
        // Nothing is verified if the container is not trusted, or is removed.
        let Some(container_dir) = self.accept_trusted(None, lookup)?.flatten() else {
            return Ok(());
        };
        let dir = container_dir.dir();
        self.verify_head(dir, file, generation)?;
        // The seal is read before the names. All indexes that it counts existed then, so a missing one is a fault.
        let seal = self.load_seal(dir)?;
        let names = container_dir.names()?;
        self.is_dying = names.contains(DYING) || names.contains(DEAD);
        for name in &names {
            if let Some(writer) = Writer::from_index_name(name.as_bytes()) {
                let limit = seal.as_ref().map(|seal| seal.limit_of(&writer));
                self.verify_index(dir, &writer, limit)?;
            } else if let Some((writer, part)) = Writer::parse_table_name(name.as_bytes()) {
                self.verify_table(dir, name, &writer, part)?;
            }
        }
        for writer in seal.iter().flat_map(Seal::writers) {
            let index_name = writer.index_name();
            if !names.contains(&index_name) {
                let index = CheckedFile {
                    file: &index_name,
                    host: Some(writer.host()),
                };
                self.add_finding(Some(&index), None, Fault::Missing);
            }
        }
        Ok(())
    }

    /// Verifies the head of the container.
    fn verify_head(&mut self, dir: &B::Inode, file: FileId, generation: u32) -> Result<()> {
        let head_file = CheckedFile {
            file: HEAD,
            host: None,
        };
        let head = head::load(self.backing, dir, file, generation);
        if let Some(HeadState::Unusable(error)) = self.accept_trusted(Some(&head_file), head)? {
            self.add_finding(Some(&head_file), None, Fault::Head(error));
        }
        Ok(())
    }

    /// Reads the seal, if there is one.
    fn load_seal(&mut self, dir: &B::Inode) -> Result<Option<Seal>> {
        let checked_file = CheckedFile {
            file: SEAL_NAME,
            host: None,
        };
        let lookup = own::read_file(self.backing, dir, SEAL_NAME);
        let Some(bytes) = self.accept_trusted(Some(&checked_file), lookup)?.flatten() else {
            return Ok(None);
        };
        let seal = Seal::decode(&bytes);
        if seal.is_none() {
            self.add_finding(Some(&checked_file), None, Fault::Seal);
        }
        Ok(seal)
    }

    /// Verifies all frames of an index, the entries of a host's list of changes, and the bytes of logs that they name.
    /// `limit` is how many bytes of the index count by the seal; `None` without a seal.
    fn verify_index(&mut self, dir: &B::Inode, writer: &Writer, limit: Option<u64>) -> Result<()> {
        let name = writer.index_name();
        let checked_file = CheckedFile {
            file: &name,
            host: Some(writer.host()),
        };
        let lookup = own::find_file(self.backing, dir, &name);
        let Some(inode) = self.accept_trusted(Some(&checked_file), lookup)?.flatten() else {
            return Ok(());
        };
        let index = self.backing.open(&inode, Access::Read)?;
        let mut offset = 0;
        let mut last_log = None;
        let mut buf = vec![0; INDEX_READ_BYTES];
        loop {
            let count = self.backing.read_at(&index, &mut buf, offset)?;
            let mut undecoded = &buf[..count];
            let read_start = offset;
            while let DecodedFrame::Complete(frame, bytes) = Frame::decode(undecoded) {
                offset += bytes as u64;
                undecoded = &undecoded[bytes..];
                if let Change::Written(written) = frame.change {
                    self.verify_data(dir, writer, &written, &mut last_log)?;
                }
            }
            let has_found_frames = offset != read_start;
            if has_found_frames {
                continue;
            }
            // No further valid frame follows. The index is damaged if bytes that count are missing. Other bytes at its
            // end are a frame that was not written completely.
            let is_short = limit.is_some_and(|limit| offset < limit);
            if is_short || has_synced_frame_after(self.backing, &index, offset)? {
                self.add_finding(Some(&checked_file), Some(offset), Fault::Index);
            } else if !undecoded.is_empty() {
                self.add_finding(Some(&checked_file), Some(offset), Fault::Torn);
            }
            return Ok(());
        }
    }

    /// Compares the bytes of a log that a frame (entry of an index) describes with their checksums. Damage is added to
    /// the findings. `last_log` caches the log that was opened last.
    fn verify_data(
        &mut self,
        dir: &B::Inode,
        writer: &Writer,
        written: &Written,
        last_log: &mut Option<OpenLog<B>>,
    ) -> Result<()> {
        let name = writer.log_name(written.log);
        let checked_file = CheckedFile {
            file: &name,
            host: Some(writer.host()),
        };
        let is_open = last_log
            .as_ref()
            .is_some_and(|log| log.number == written.log);
        if !is_open {
            *last_log = self.open_log(dir, &checked_file, written.log)?;
        }
        let written_bytes = written.bytes();
        for (block, checksum) in written.checksums.iter().enumerate() {
            let block_start = block as u64 * CHECKED_BYTES;
            let position = written.position + block_start;
            let mut bytes = vec![0; CHECKED_BYTES.min(written_bytes - block_start) as usize];
            let is_read = match last_log {
                None => false,
                Some(log) => match read_exact(self.backing, &log.file, &mut bytes, position) {
                    Ok(()) => true,
                    Err(Errno::IO) => false,
                    Err(error) => return Err(error),
                },
            };
            if !is_read || crc32c::crc32c(&bytes) != *checksum {
                self.add_finding(Some(&checked_file), Some(position), Fault::Data);
            }
        }
        Ok(())
    }

    /// Opens a log. Returns `None` if it is missing or not trusted.
    fn open_log(
        &mut self,
        dir: &B::Inode,
        log: &CheckedFile<'_>,
        number: u32,
    ) -> Result<Option<OpenLog<B>>> {
        let lookup = own::find_file(self.backing, dir, log.file);
        let Some(inode) = self.accept_trusted(Some(log), lookup)?.flatten() else {
            return Ok(None);
        };
        let file = self.backing.open(&inode, Access::Read)?;
        Ok(Some(OpenLog { number, file }))
    }

    /// Verifies all blocks of a table, a sorted part of an index. Damage is added to the findings.
    fn verify_table(
        &mut self,
        dir: &B::Inode,
        name: &str,
        writer: &Writer,
        part: std::ops::Range<u64>,
    ) -> Result<()> {
        let checked_file = CheckedFile {
            file: name,
            host: Some(writer.host()),
        };
        let lookup = own::find_file(self.backing, dir, name);
        let Some(Some(_)) = self.accept_trusted(Some(&checked_file), lookup)? else {
            return Ok(());
        };
        let is_whole = match Table::open(self.backing, dir, writer, part)? {
            None => false,
            Some(table) => match read_whole(self.backing, &table) {
                Ok(()) => true,
                Err(TableError::Damaged) => false,
                Err(error) => return Err(error.into()),
            },
        };
        if !is_whole {
            let no_offset = None;
            self.add_finding(Some(&checked_file), no_offset, Fault::Sorted);
        }
        Ok(())
    }
}

/// Reads all blocks of a table, which checks them.
fn read_whole<B: Backing>(backing: &B, table: &Table<B>) -> TableResult<()> {
    for layer in table.layers(backing) {
        layer?;
    }
    for span in table.spans(backing) {
        span?;
    }
    Ok(())
}
