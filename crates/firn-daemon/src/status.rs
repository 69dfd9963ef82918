//! The engine's figures as the control protocol tells them.

use firn_engine::{
    ErrorFigures, Figures, FileFigures, LaneFigures, ListedPart, PartPlace, SpillFigures,
};
use firn_protocol::{
    ChunkPiece, ErrorStatus, FileStatus, LaneStatus, NumaNodeStatus, Place, SpillStatus, Status,
    TokenState, TokenStatus,
};
use firn_tokens::TokenFigures;

use crate::process;

/// The engine's part of a mount's status.
pub(crate) fn engine_status(figures: Figures) -> Status {
    let numa_nodes = figures.numa_nodes.iter().map(|node| NumaNodeStatus {
        numa_node: node.id,
        bytes: node.bytes,
        used_bytes: node.used_bytes,
        foreign_slabs: node.foreign_slabs,
    });
    Status {
        uptime_s: figures.uptime.as_secs_f64(),
        epoch: figures.epoch,
        arena_bytes: figures.arena_bytes,
        arena_used_bytes: figures.arena_used_bytes,
        chunk_bytes: figures.chunk_bytes,
        held_bytes: figures.held_bytes,
        held_files: figures.held_files,
        oldest_held_ms: figures.oldest_held.map(|age| age.as_millis() as u64),
        recovered_bytes: figures.recovered_bytes,
        lost_file_bytes: figures.lost_file_bytes,
        open_files: figures.open_files,
        waiting_writers: figures.waiting_writers,
        ingest_bytes: figures.ingest_bytes,
        ingest_writes: figures.ingest_writes,
        drain_bytes: figures.drain_bytes,
        drain_writes: figures.drain_writes,
        drain_errors: figures.drain_errors,
        drain_decisions: figures.drain_decisions,
        cancelled_bytes: figures.cancelled_bytes,
        cached_bytes: figures.cached_bytes,
        kernel_copies_bytes: figures.kernel_copies_bytes,
        kernel_copies_bytes_max: figures.kernel_copies_bytes_max,
        evicted_bytes: figures.evicted_bytes,
        read_bytes: figures.read_bytes,
        direct_files: figures.direct_access.files,
        direct_leases: figures.direct_access.leases,
        direct_errors: figures.direct_access.errors,
        chunk_lists: figures.chunk_lists,
        chunk_list_bytes: figures.chunk_list_bytes,
        spill: figures.spill.map(spill_status),
        numa_nodes: numa_nodes.collect(),
        lanes: figures.lanes.iter().map(lane_status).collect(),
        errors: errors_status(figures.errors),
        ..Status::default()
    }
}

fn spill_status(figures: SpillFigures) -> SpillStatus {
    SpillStatus {
        path: figures.path.into(),
        bytes: figures.bytes,
        used_bytes: figures.used_bytes,
        moved_bytes: figures.moved_bytes,
        moved_bytes_per_s: 0.0,
        failing: figures.is_failing,
    }
}

fn lane_status(figures: &LaneFigures) -> LaneStatus {
    LaneStatus {
        writers: figures.writers as u32,
        retry_in_ms: figures.retry_in.map(|wait| wait.as_millis() as u64),
        queued_files: figures.queued_files as u64,
        held_files: figures.held_files,
        held_bytes: figures.held_bytes,
        file: figures.file.clone().map(Into::into),
        ..LaneStatus::default()
    }
}

/// The token of a lane.
pub(crate) fn token_status(figures: TokenFigures) -> TokenStatus {
    TokenStatus {
        state: match figures.state {
            firn_tokens::TokenState::Idle => TokenState::Idle,
            firn_tokens::TokenState::Waiting => TokenState::Waiting,
            firn_tokens::TokenState::Held => TokenState::Held,
            firn_tokens::TokenState::Without => TokenState::Without,
        },
        for_ms: figures.age.as_millis() as u64,
        holder: figures.holder,
        granted: figures.granted,
        waited_ms: figures.waited.as_millis() as u64,
        went_without: figures.went_without,
        errors: figures.errors,
        last_error: figures.last_error,
    }
}

/// The recorded errors; those that a limit of firnd itself explains say so.
pub(crate) fn errors_status(errors: Vec<ErrorFigures>) -> Vec<ErrorStatus> {
    errors.into_iter().map(error_status).collect()
}

fn error_status(figures: ErrorFigures) -> ErrorStatus {
    let error = figures.error;
    let message = match process::limit_behind(error.errno) {
        Some(limit) => format!("{}: {limit}", error.message),
        None => error.message,
    };
    ErrorStatus {
        path: error.path.into(),
        errno: error.errno.raw_os_error(),
        message,
        count: error.count,
        age_s: error.last.elapsed().as_secs_f64(),
        pending: figures.is_pending,
    }
}

/// Files with pending data.
pub(crate) fn file_status(figures: FileFigures) -> FileStatus {
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

/// A part of a chunk list.
pub(crate) fn chunk_piece(part: ListedPart) -> ChunkPiece {
    let place = match part.place {
        PartPlace::Memory => Place::Memory,
        PartPlace::Spill => Place::Spill,
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
