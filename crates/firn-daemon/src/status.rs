//! Converts files, chunks, tokens and errors to the types of the control protocol.

use firn_backing::Errno;
use firn_engine::{Engine, FileFigures, ListedPart, PartPlace};
use firn_hosts::tokens::TokenFigures;
use firn_protocol::{ChunkPiece, ErrorStatus, FileStatus, Place, TokenState, TokenStatus};

use crate::process;
use crate::store::Store;

/// Returns the status of a token, the lock that lets one host at a time write to a lane (I/O server). In the state
/// `Without` the host writes without its token, because the lock service does not answer.
pub(crate) fn token_status(figures: TokenFigures) -> TokenStatus {
    TokenStatus {
        state: match figures.state {
            firn_hosts::tokens::TokenState::Idle => TokenState::Idle,
            firn_hosts::tokens::TokenState::Waiting => TokenState::Waiting,
            firn_hosts::tokens::TokenState::Held => TokenState::Held,
            firn_hosts::tokens::TokenState::Without => TokenState::Without,
        },
        state_seconds: figures.age.as_secs_f64(),
        holder: figures.holder,
        granted: figures.granted,
        waited_seconds: figures.waited.as_secs_f64(),
        went_without: figures.went_without,
        errors: figures.errors,
        last_error: figures.last_error,
    }
}

/// Adds an explanation to errors that are caused by a limit of firnd's own process.
pub(crate) fn explain_errors(errors: &mut [ErrorStatus]) {
    for error in errors {
        if let Some(limit) = process::describe_limit_behind(Errno::from_raw_os_error(error.errno)) {
            error.message += &format!(": {limit}");
        }
    }
}

/// Returns the files at or below `path` that are open or have bytes in the arena. With `includes_idle` it
/// returns all files of which the engine has data or state that the backing lacks.
pub(crate) fn list_files(
    engine: &Engine<Store>,
    path: &[u8],
    includes_idle: bool,
) -> Vec<FileStatus> {
    let files = if includes_idle {
        engine.files_below(path)
    } else {
        engine.files_in_use_below(path)
    };
    files.into_iter().map(file_status).collect()
}

fn file_status(figures: FileFigures) -> FileStatus {
    FileStatus {
        path: figures.path.into(),
        state: figures.level,
        held_bytes: figures.held_bytes,
        held_end: figures.held_end,
        open: figures.open,
        ending: figures.ending,
        changes: figures.changes,
        in_transaction: false,
    }
}

/// Converts one part of a chunk list, which says where the bytes of a file are: in memory, in the spill file (the
/// arena's extension on a disk), in a memory file (one large file's bytes), in the backing, or nowhere (a hole).
pub(crate) fn chunk_piece(part: ListedPart) -> ChunkPiece {
    let place = match part.place {
        PartPlace::Memory => Place::Memory,
        PartPlace::Spill => Place::Spill,
        PartPlace::MemoryFile => Place::MemoryFile,
        PartPlace::Backing => Place::Backing,
        PartPlace::Hole => Place::Hole,
    };
    ChunkPiece {
        offset: part.offset,
        bytes: part.bytes,
        place,
        at: part.at,
        chunk: part.chunk,
    }
}
