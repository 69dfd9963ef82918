//! Chunk lists as another program has them: over the control socket, and out of the two files.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use firn_protocol::path::BytePath;
use firn_protocol::{ChunkList, DataRegion, Place, Reply, Request};

use crate::fsops::read_at;
use crate::sandbox::Sandbox;

/// A connection to the only firnd of a sandbox.
pub struct Control {
    stream: BufReader<UnixStream>,
}

impl Control {
    /// Connects.
    #[track_caller]
    pub fn new(sandbox: &Sandbox) -> Self {
        let socket = sandbox.arena().with_extension("sock");
        let stream =
            UnixStream::connect(&socket).unwrap_or_else(|e| panic!("connect {socket:?}: {e}"));
        Self {
            stream: BufReader::new(stream),
        }
    }

    /// The answer; `None`: firnd is gone.
    pub fn ask(&mut self, request: &Request) -> Option<Reply> {
        let mut line = serde_json::to_vec(request).expect("plain JSON");
        line.push(b'\n');
        self.stream.get_mut().write_all(&line).ok()?;
        self.next_reply()
    }

    /// The next line that firnd says; `None`: it is gone.
    pub fn next_reply(&mut self) -> Option<Reply> {
        let mut answer = String::new();
        self.stream.read_line(&mut answer).ok().filter(|n| *n > 0)?;
        Some(serde_json::from_str(&answer).unwrap_or_else(|e| panic!("{e}: {answer}")))
    }

    /// A list, or its errno.
    #[track_caller]
    pub fn list(&mut self, path: &str) -> Result<ChunkList, i32> {
        match self.ask(&Request::Chunks { path: path.into() }) {
            Some(Reply::Chunks(list)) => Ok(list),
            Some(Reply::Error { errno, .. }) => Err(errno),
            other => panic!("{other:?}"),
        }
    }

    /// Whether the file changed since.
    #[track_caller]
    pub fn changed(&mut self, list: &ChunkList) -> bool {
        match self.ask(&Request::CheckChunks { list: list.list }) {
            Some(Reply::ChunksChecked { changed }) => changed,
            other => panic!("{other:?}"),
        }
    }

    /// Lets a list go.
    #[track_caller]
    pub fn release(&mut self, list: &ChunkList) {
        assert_eq!(
            self.ask(&Request::ReleaseChunks { list: list.list }),
            Some(Reply::Done)
        );
    }

    /// Where the data is.
    #[track_caller]
    pub fn region(&mut self) -> DataRegion {
        match self.ask(&Request::Region) {
            Some(Reply::Region(region)) => region,
            other => panic!("{other:?}"),
        }
    }
}

/// The files in which pieces are.
pub struct Files {
    arena: File,
    arena_path: BytePath,
    offset: u64,
    bytes: u64,
    spill: Option<File>,
}

impl Files {
    /// Opens them for reading.
    #[track_caller]
    pub fn of(region: &DataRegion) -> Self {
        let open = |path: &BytePath| File::open(path).unwrap_or_else(|e| panic!("{path}: {e}"));
        let spill = region.spill.as_ref().map(|spill| open(&spill.path));
        Self {
            arena: open(&region.path),
            arena_path: region.path.clone(),
            offset: region.offset,
            bytes: region.bytes,
            spill,
        }
    }

    /// The file that a list describes, read through the list alone; `behind` is its file in the backing. Fails
    /// where the pieces leave a gap, overlap or are outside of what holds them.
    #[track_caller]
    pub fn read(&self, list: &ChunkList, behind: &Path) -> Vec<u8> {
        let mut contents = Vec::new();
        for piece in &list.pieces {
            assert_eq!(
                piece.offset,
                contents.len() as u64,
                "a gap or an overlap: {:?}",
                list.pieces
            );
            let len = piece.bytes as usize;
            let found = match piece.place {
                Place::Memory => {
                    assert!(
                        piece.at + piece.bytes <= self.bytes,
                        "{piece:?} is outside of the region"
                    );
                    read_at(&self.arena, self.offset + piece.at, len)
                }
                Place::Spill => read_at(self.spill.as_ref().expect("a spill file"), piece.at, len),
                Place::MemoryFile => {
                    let number = piece.chunk.expect("the number of a memory file");
                    let mut path = self.arena_path.as_path().as_os_str().to_owned();
                    path.push(format!(".m{number}"));
                    read_at(&File::open(path).expect("open"), piece.at, len)
                }
                Place::Backing => read_at(&File::open(behind).expect("open"), piece.at, len),
                Place::Hole => vec![0; len],
            };
            assert_eq!(found.len(), len, "{piece:?} is cut off");
            contents.extend(found);
        }
        assert_eq!(contents.len() as u64, list.bytes, "{:?}", list.pieces);
        contents
    }
}

/// Bytes of a list that are in one place.
pub fn bytes_in(list: &ChunkList, place: Place) -> u64 {
    list.pieces
        .iter()
        .filter(|piece| piece.place == place)
        .map(|piece| piece.bytes)
        .sum()
}
