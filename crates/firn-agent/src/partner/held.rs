//! The partner's side: keeps copies of the files that one other host, the *source*, holds in memory. This host is the
//! *partner* of the source.
//!
//! This host follows the source while the source accepts it as a partner: it lists the source's files in rounds, and
//! copies those that are complete (`crate::follow`). If the following connection is silent for long, the source
//! considers this partner dead. The partner therefore sends heartbeats, which are short requests, during long work.
//!
//! Terms
//! * *firnd*: the process that serves the source's mount. It counts the changes of each file.
//! * *mark*: reports to the source that this host has a copy of a file, with the number of changes in the copy.
//! * *arena*: the memory of a mount. If the source has another arena than before, the files of the earlier one are in
//!   the backing (the directory that the mount serves), or they are lost.
//!
//! Invariants
//! * A file is marked only if a complete copy with the marked number of changes has its final name.
//! * A copy that may be the last one is replaced or removed only if its bytes exist elsewhere. This is a copy from an
//!   arena that the source has lost.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::backoff::Backoff;
use firn_format::quantity;
use firn_format::quote::quoted_path;
use firn_protocol::path::BytePath;

use crate::error::PullError;
use crate::follow::{CopyPlan, Follower, Policy, RoundResult};
use crate::message::{Entry, EntryList, ErrorKind, FirndIdentity};
use crate::partner::copies::{InsufficientSpace, SpaceReservation};
use crate::partner::copy::PartnerCopy;
use crate::partner::record::{CopyRecord, stored_bytes};
use crate::partner::service::PartnerService;
use crate::peer::{Peer, Route};
use crate::pull::{Outcome, PullRequest, PullSource, check_entries, is_same_as_remote};
use crate::server::Level;
use crate::source::join;
use crate::transport_choice::DataTransport;
use crate::units::{Unit, group_by_name};

/// Usual time between two rounds.
const ROUND_INTERVAL: Duration = Duration::from_millis(50);
/// Time between two rounds if a file was closed since the last one. If the file is unchanged in the next round, that
/// round copies it.
const ROUND_INTERVAL_AFTER_CHANGE: Duration = Duration::from_millis(20);
/// Minimum ratio of a pause to the time of the list before it, so that lists use only a small share of the time.
const PAUSE_PER_LIST_TIME: u32 = 20;
/// Maximum time between two rounds.
const ROUND_INTERVAL_MAX: Duration = Duration::from_secs(5);
/// Time between two heartbeats: well below the silence after which the source considers a partner dead
/// ([`crate::session`]).
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);
/// Pauses between two attempts to connect to the source.
const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));
/// Time without a connection after which this host stops following. The source asks again when it is back.
const UNREACHABLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of a mebibyte, for figures in the log.
const MIB: f64 = (1 << 20) as f64;

/// Follows a source until it has another partner, or is unreachable for [`UNREACHABLE_TIMEOUT`]. The copies remain.
pub(super) fn follow_source(service: &Arc<PartnerService>, source: &str) {
    let error = Follower::new(CopyHeld {
        service,
        source,
        route: service.route(),
    })
    .run();
    service.log.say(Level::Event, || {
        format!("this host no longer copies the files of {source}: {error}")
    });
}

/// The policy that copies all held files of a source and marks them there.
struct CopyHeld<'a> {
    service: &'a Arc<PartnerService>,
    source: &'a str,
    route: Route,
}

/// The connection by which this partner follows. When it ends, its marks become void.
struct FollowConnection {
    peer: Peer,
    /// The firnd of the source, to whose numbers of changes the marks refer.
    firnd: FirndIdentity,
    last_heartbeat_at: Instant,
    /// The note about this partner that the source shows.
    note: String,
    /// Copies of an earlier arena that were already compared with the backing on this connection. Each is compared
    /// once.
    compared_units: BTreeSet<BytePath>,
}

impl FollowConnection {
    /// Marks the held files of a unit that the source does not show as partnered.
    fn mark_copied(&mut self, unit: &BytePath, entries: &[Entry]) -> Result<(), PullError> {
        for entry in entries {
            if let Some(held) = entry.held
                && !held.partnered
            {
                let path = join(unit, entry.path.as_path());
                self.peer.mark_copied(&path, held.changes)?;
            }
        }
        Ok(())
    }

    /// Sends a heartbeat if the last one is old. Called often during long work.
    fn send_due_heartbeat(&mut self) -> Result<(), PullError> {
        if self.last_heartbeat_at.elapsed() <= HEARTBEAT_INTERVAL {
            return Ok(());
        }
        self.last_heartbeat_at = Instant::now();
        self.peer.send_heartbeat()
    }
}

impl Policy for CopyHeld<'_> {
    type Connection = FollowConnection;
    type Reservation = SpaceReservation;

    fn retry_backoff(&self) -> Backoff {
        RETRY
    }

    fn connect(&mut self) -> Result<FollowConnection, PullError> {
        let mut peer = Peer::connect(self.source, &self.route)?;
        let firnd = peer.follow(&self.service.host)?;
        self.service.copies.remove_leftovers(self.source)?;
        Ok(FollowConnection {
            peer,
            firnd,
            last_heartbeat_at: Instant::now(),
            note: String::new(),
            compared_units: BTreeSet::new(),
        })
    }

    fn should_stop(&self, error: &PullError, time_unreachable: Duration) -> bool {
        let is_refused = matches!(
            error,
            PullError::Remote {
                kind: ErrorKind::Refused,
                ..
            }
        );
        is_refused || time_unreachable > UNREACHABLE_TIMEOUT
    }

    fn list_units(&mut self, connection: &mut FollowConnection) -> Result<Vec<Unit>, PullError> {
        let list = connection.peer.list_held(&BytePath::default())?;
        let entries =
            check_entries(list.entries).map_err(|what| connection.peer.implausible(what))?;
        Ok(group_by_name(&entries))
    }

    fn confirm_copy(
        &mut self,
        connection: &mut FollowConnection,
        unit: &Unit,
    ) -> Result<bool, PullError> {
        let Some(copy) = self.service.copies.find_copy(self.source, &unit.name) else {
            return Ok(false);
        };
        let incarnation = &connection.firnd.incarnation;
        if !copy.record.is_current(incarnation, &unit.entries) {
            return Ok(false);
        }
        connection.mark_copied(&unit.name, &unit.entries)?;
        Ok(true)
    }

    /// Decides whether to copy one unit of the source, the host of which this host keeps copies. A unit is a name in
    /// the source's mount with everything below it. If it is to be copied, reserves the space.
    ///
    /// The unit is not copied if [`Self::plan_to_keep`] keeps an earlier copy, or if there is no space.
    fn plan_copy(
        &mut self,
        connection: &mut FollowConnection,
        unit: &Unit,
    ) -> Result<CopyPlan<SpaceReservation>, PullError> {
        if let Some(copy) = self.service.copies.find_copy(self.source, &unit.name)
            && let Some(plan) = self.plan_to_keep(&copy, unit, connection)?
        {
            return Ok(plan);
        }
        let bytes = stored_bytes(&unit.entries);
        let reservation = match self.service.copies.reserve(bytes) {
            Ok(reservation) => reservation,
            Err(error) => {
                return Ok(CopyPlan::Refuse(
                    self.explain_insufficient_space(&unit.name, bytes, error),
                ));
            }
        };
        let request = PullRequest {
            host: self.source.to_owned(),
            route: self.route.clone(),
            source: PullSource::Held(unit.name.clone()),
            // Each copy is a separate pull. Most pulls take less time than the registration of the arena with
            // libfabric.
            carriage: DataTransport::connection_only(),
            target: self.service.copies.begin_copy(self.source, &unit.name)?,
            // A unit with an open file is an error.
            cut: false,
            // A stalled pull ends at once. The next round tries again.
            patience: Duration::ZERO,
            bytes_max: Some(bytes),
        };
        Ok(CopyPlan::Pull {
            request,
            reservation,
        })
    }

    fn on_progress(&mut self, connection: &mut FollowConnection) -> Result<(), PullError> {
        connection.send_due_heartbeat()
    }

    /// Gives the complete copy of a unit its name and its record. Then reports each of its files to the source (the
    /// copied host) as copied, with the file's number of changes: a *mark*.
    ///
    /// If a file was changed during the pull, the copy is aborted, which is no error. `elapsed` is for the log.
    fn commit_copy(
        &mut self,
        connection: &mut FollowConnection,
        unit: &Unit,
        outcome: Outcome,
        elapsed: Duration,
    ) -> Result<(), PullError> {
        if !outcome.changed.is_empty() {
            // A later round copies the new state.
            return self.abort_copy(unit);
        }
        // The record identifies the state of the source: its memory (`arena`), and the run of its server
        // (`incarnation`), which counts the changes.
        let record = CopyRecord {
            unit: unit.name.clone(),
            arena: connection.firnd.arena.clone(),
            incarnation: connection.firnd.incarnation.clone(),
            entries: outcome.entries,
        };
        self.service.copies.commit_copy(self.source, &record)?;
        self.service.log.say(Level::Event, || {
            let mib = outcome.bytes as f64 / MIB;
            let seconds = elapsed.as_secs_f64();
            format!(
                "copied {} of {}: {} files, {mib:.1} MiB in {seconds:.2} s",
                unit.name, self.source, outcome.files
            )
        });
        connection.mark_copied(&record.unit, &record.entries)
    }

    fn abort_copy(&mut self, unit: &Unit) -> Result<(), PullError> {
        self.service.copies.abort_copy(self.source, &unit.name)
    }

    fn describe_failure(&self, unit: &Unit, error: &PullError) -> String {
        format!("{} cannot copy {}: {error}", self.service.host, unit.name)
    }

    /// Removes copies of units that the source, the copied host, no longer has in memory. `units` are those that it
    /// has. A copy remains if [`Self::may_remove`] says that it may be the last one.
    fn remove_unneeded(
        &mut self,
        connection: &mut FollowConnection,
        units: &[Unit],
    ) -> Result<Vec<PullError>, PullError> {
        let held_units: BTreeSet<_> = units.iter().map(|unit| &unit.name).collect();
        for copy in self.service.copies.copies_of(self.source) {
            let unit = &copy.record.unit;
            if held_units.contains(unit) {
                continue;
            }
            if !self.may_remove(&copy, connection)? {
                continue;
            }
            self.service.copies.remove_copy(self.source, unit)?;
            self.service.log.say(Level::Event, || {
                let shown_unit = quoted_path(Path::new(unit.as_path()));
                let source = self.source;
                format!(
                    "removed the copy of {shown_unit} of {source}, which does not hold it any more"
                )
            });
        }
        Ok(Vec::new())
    }

    fn show_problem(&mut self, problem: &str) {
        let source = self.source;
        self.service.log.say(Level::Event, || {
            format!("copies of files of {source}: {problem}")
        });
    }

    /// Reports the problems of a round (one pass over the files of the source, the copied host) to the source. Its
    /// status shows one note about this partner, so the note has the first problem and the number of others.
    ///
    /// Sends nothing if the note is the same as before.
    fn report_to_source(
        &mut self,
        connection: &mut FollowConnection,
        problems: &[String],
    ) -> Result<(), PullError> {
        let note = match problems {
            [] => String::new(),
            [problem] => problem.clone(),
            [problem, others @ ..] => format!("{problem} (and {} more)", others.len()),
        };
        if note != connection.note {
            connection.peer.set_note(&note)?;
            connection.note = note;
        }
        Ok(())
    }

    /// Waits until the next round, which lists the files of the source (the copied host) again. The pause is in
    /// proportion to the time of the last list, so that lists use only a small share of the time.
    ///
    /// Sends heartbeats meanwhile: after a long silence the source considers this partner dead.
    fn wait_for_next_round(
        &mut self,
        connection: &mut FollowConnection,
        last_round: RoundResult,
    ) -> Result<(), PullError> {
        let min_pause = if last_round.has_changed_unit {
            ROUND_INTERVAL_AFTER_CHANGE
        } else {
            ROUND_INTERVAL
        };
        let pause = PAUSE_PER_LIST_TIME * last_round.list_time;
        let deadline = Instant::now() + pause.clamp(min_pause, ROUND_INTERVAL_MAX);
        loop {
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining <= HEARTBEAT_INTERVAL {
                std::thread::sleep(remaining);
                return Ok(());
            }
            std::thread::sleep(HEARTBEAT_INTERVAL);
            connection.peer.send_heartbeat()?;
        }
    }
}

impl CopyHeld<'_> {
    /// Returns a plan if an earlier copy of a unit must remain; `None` if a new copy is to replace it.
    ///
    /// There are two reasons to keep a copy:
    /// * The source has lost the memory (the arena) from which it was made, and it has files that exist nowhere else.
    /// * It still has the same bytes as the unit. The files are then marked as copied again.
    fn plan_to_keep(
        &mut self,
        copy: &PartnerCopy,
        unit: &Unit,
        connection: &mut FollowConnection,
    ) -> Result<Option<CopyPlan<SpaceReservation>>, PullError> {
        let is_of_lost_arena = copy.record.arena != connection.firnd.arena;
        if is_of_lost_arena {
            let must_keep = self.has_unique_files(copy, unit, connection)?;
            return Ok(must_keep.then(|| CopyPlan::Refuse(self.explain_kept_copy(&unit.name))));
        }
        let Some(entries) = self.revalidate_copy(copy, &unit.name, connection)? else {
            return Ok(None);
        };
        connection.mark_copied(&unit.name, &entries)?;
        Ok(Some(CopyPlan::Skip))
    }

    /// Whether a copy of a unit that the source no longer has in memory can be removed without a loss of bytes.
    ///
    /// If the source still has the same memory (*arena*), it has written the unit to the served directory (the
    /// *backing*) or removed it. If it has lost that memory, the copy may be removed only if the backing has all bytes
    /// of the copy.
    fn may_remove(
        &self,
        copy: &PartnerCopy,
        connection: &mut FollowConnection,
    ) -> Result<bool, PullError> {
        if copy.record.arena == connection.firnd.arena {
            return Ok(true);
        }
        let unit = &copy.record.unit;
        // Each comparison reads all bytes, so it is made once for each connection.
        let is_first_comparison = connection.compared_units.insert(unit.clone());
        if !is_first_comparison {
            return Ok(false);
        }
        let unit_path = self.service.mount_point.join(unit);
        let on_progress = &mut || connection.send_due_heartbeat();
        copy.has_all_files_in(&unit_path, on_progress)
    }

    /// Checks by checksums whether a copy is still valid after a restart of the source's server (firnd), which counts
    /// the changes of each file anew. If so, writes a new record for the copy, and returns the source's list of its
    /// files.
    ///
    /// Returns `None` if a file that the source holds in memory has other bytes than the copy, or if the server is the
    /// same. The copy must then be made again.
    fn revalidate_copy(
        &mut self,
        copy: &PartnerCopy,
        unit: &BytePath,
        connection: &mut FollowConnection,
    ) -> Result<Option<Vec<Entry>>, PullError> {
        // The same firnd made the counts, so they show that the unit has changed since the copy.
        if copy.record.incarnation == connection.firnd.incarnation {
            return Ok(None);
        }
        // A second connection, because the source opens no files over the connection that follows it.
        let mut peer = Peer::connect(self.source, &self.route)?;
        let EntryList { top, entries } = match peer.list_held(unit) {
            Ok(list) => list,
            Err(PullError::Remote {
                kind: ErrorKind::Missing,
                ..
            }) => return Ok(None),
            Err(error) => return Err(error),
        };
        if !copy.record.has_same_shape(&entries) {
            return Ok(None);
        }
        let on_progress = &mut || connection.send_due_heartbeat();
        for entry in entries.iter().filter(|entry| entry.held.is_some()) {
            let Ok(copied_file) = copy.open(entry.path.as_path()) else {
                return Ok(None);
            };
            if !is_same_as_remote(&mut peer, &top, entry, &copied_file, on_progress)? {
                return Ok(None);
            }
        }
        let incarnation = &connection.firnd.incarnation;
        let record = copy.record.with_firnd(incarnation, &entries);
        self.service.copies.replace_record(self.source, &record)?;
        self.service.log.say(Level::Event, || {
            let source = self.source;
            format!("the copy of {unit} of {source} still has the bytes that {source} holds: nothing is copied again")
        });
        Ok(Some(entries))
    }

    /// Whether a copy of a lost arena has files that the source does not hold and whose bytes the backing does not
    /// have.
    fn has_unique_files(
        &self,
        copy: &PartnerCopy,
        unit: &Unit,
        connection: &mut FollowConnection,
    ) -> Result<bool, PullError> {
        let unheld_files = copy.record.files_not_in(&unit.entries);
        let unit_path = self.service.mount_point.join(&unit.name);
        let on_progress = &mut || connection.send_due_heartbeat();
        let are_in_backing = copy.has_files_in(&unheld_files, &unit_path, on_progress)?;
        Ok(!are_in_backing)
    }

    /// Explains why a unit is not copied, and how a user can give the copies more space.
    fn explain_insufficient_space(
        &self,
        unit: &BytePath,
        unit_bytes: u64,
        error: InsufficientSpace,
    ) -> String {
        format!(
            "{} has no room for {} of {unit}: {} of {} are in use (raise the limit with `firn agent --partner-size`)",
            self.service.host,
            quantity::bytes(unit_bytes),
            quantity::bytes(error.used_bytes),
            quantity::bytes(error.bytes_max)
        )
    }

    /// Explains why a copy of a lost arena is not replaced, and how a user can fetch it.
    fn explain_kept_copy(&self, name: &BytePath) -> String {
        let host = &self.service.host;
        let source = self.source;
        format!(
            "{host} keeps its copy of {name} from before {source} lost its memory, and does not replace it with newer \
             files: fetch it with `firn pull {host}:{source}/{name}` or `firn run --restart {source}`"
        )
    }
}
