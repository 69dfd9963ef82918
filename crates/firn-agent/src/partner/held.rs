//! The partner's side: keeps copies of the files that one source host holds in memory.
//!
//! This host follows the source (`crate::follow`) while the source accepts it as a partner. A copy is marked at the
//! source with the copy's number of changes. If the following connection is silent for long, the source considers this
//! partner dead. The partner therefore sends beats during long work.
//!
//! Invariants
//! * A file is marked only if a complete copy with the marked number of changes has its final name.
//! * A copy of an arena that the source lost is replaced or removed only if other files have the same bytes.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::backoff::Backoff;
use firn_format::quantity;
use firn_format::quote::quoted_path;
use firn_protocol::path::BytePath;

use crate::error::PullError;
use crate::follow::{Follower, Policy, RoundReport, Step};
use crate::message::{Entry, ErrorKind};
use crate::partner::copies::{NoRoom, Room};
use crate::partner::copy::Copy;
use crate::partner::record::{Record, stored_bytes};
use crate::partner::service::PartnerService;
use crate::peer::{Peer, Route};
use crate::pull::{Outcome, PullRequest, PullSource, check_entries, is_same_file};
use crate::server::Level;
use crate::source::join;
use crate::transport_choice::Carriage;
use crate::units::{Unit, group_by_name};

/// Usual time between two rounds.
const ROUND_INTERVAL: Duration = Duration::from_millis(50);
/// Time between two rounds if a file was closed since the last one. If the file is unchanged in the next round, that
/// round copies it.
const SETTLE_INTERVAL: Duration = Duration::from_millis(20);
/// Minimum ratio of a pause to the time of the list before it, so that lists use only a small share of the time.
const PAUSE_PER_LIST_TIME: u32 = 20;
/// Maximum time between two rounds.
const ROUND_INTERVAL_MAX: Duration = Duration::from_secs(5);
/// Time between two beats: well below the silence after which the source considers a partner dead ([`crate::session`]).
const BEAT_INTERVAL: Duration = Duration::from_secs(2);
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
        format!("this host does not follow {source} any more: {error}")
    });
}

/// The policy that copies all held files of a source and marks them there.
struct CopyHeld<'a> {
    service: &'a Arc<PartnerService>,
    source: &'a str,
    route: Route,
}

/// The connection by which this partner follows. When it ends, its marks become void.
struct Link {
    peer: Peer,
    /// Incarnation of the source's firnd, to whose numbers of changes the marks refer.
    incarnation: String,
    /// Identity of the source's arena.
    arena: String,
    /// When the last beat was sent.
    last_beat_at: Instant,
    /// The note about this partner that the source shows.
    note: String,
    /// Copies of an earlier arena that were already compared with the backing on this connection. Each is compared
    /// once.
    compared: BTreeSet<BytePath>,
}

impl Link {
    /// Marks the held files of a unit that the source does not show as partnered.
    fn mark(&mut self, unit: &BytePath, entries: &[Entry]) -> Result<(), PullError> {
        for entry in entries {
            if let Some(held) = entry.held
                && !held.partnered
            {
                let path = join(unit, entry.path.as_path());
                self.peer.mark(&path, held.changes)?;
            }
        }
        Ok(())
    }

    /// Sends a beat if the last one is old. Called often during long work.
    fn beat_if_due(&mut self) -> Result<(), PullError> {
        if self.last_beat_at.elapsed() <= BEAT_INTERVAL {
            return Ok(());
        }
        self.last_beat_at = Instant::now();
        self.peer.beat()
    }
}

impl Policy for CopyHeld<'_> {
    type Connection = Link;
    type Room = Room;

    fn retry(&self) -> Backoff {
        RETRY
    }

    fn connect(&mut self) -> Result<Link, PullError> {
        let mut peer = Peer::connect(self.source, &self.route)?;
        let (incarnation, arena) = peer.follow(&self.service.host)?;
        self.service.copies.sweep(self.source)?;
        Ok(Link {
            peer,
            incarnation,
            arena,
            last_beat_at: Instant::now(),
            note: String::new(),
            compared: BTreeSet::new(),
        })
    }

    fn is_over(&self, error: &PullError, time_unreachable: Duration) -> bool {
        let is_refused = matches!(
            error,
            PullError::Remote {
                kind: ErrorKind::Refused,
                ..
            }
        );
        is_refused || time_unreachable > UNREACHABLE_TIMEOUT
    }

    fn list(&mut self, link: &mut Link) -> Result<Vec<Unit>, PullError> {
        let (_, entries) = link.peer.list_held(&BytePath::default())?;
        let entries = check_entries(entries).map_err(|what| link.peer.implausible(what))?;
        Ok(group_by_name(&entries))
    }

    fn confirm_copy(&mut self, link: &mut Link, unit: &Unit) -> Result<bool, PullError> {
        let copy = self.service.copies.find(self.source, &unit.name);
        let is_current =
            copy.is_some_and(|copy| copy.record.covers(&link.incarnation, &unit.entries));
        if is_current {
            link.mark(&unit.name, &unit.entries)?;
        }
        Ok(is_current)
    }

    fn plan_copy(&mut self, link: &mut Link, unit: &Unit) -> Result<Step<Room>, PullError> {
        let copy = self.service.copies.find(self.source, &unit.name);
        if let Some(copy) = copy {
            let is_of_lost_arena = copy.record.arena != link.arena;
            if is_of_lost_arena && is_needed(&copy, unit, &self.service.mount_point, link)? {
                return Ok(Step::Refuse(self.describe_needed(&unit.name)));
            }
            if !is_of_lost_arena && let Some(entries) = self.renew(link, &copy, &unit.name)? {
                link.mark(&unit.name, &entries)?;
                return Ok(Step::Skip);
            }
        }
        let bytes = stored_bytes(&unit.entries);
        let room = match self.service.copies.reserve(bytes) {
            Ok(room) => room,
            Err(NoRoom {
                used_bytes,
                bytes_max,
            }) => {
                return Ok(Step::Refuse(format!(
                    "{} has no room for {} of {}: {} of {} are in use (raise the limit with `firn agent --partner-size`)",
                    self.service.host,
                    quantity::bytes(bytes),
                    unit.name,
                    quantity::bytes(used_bytes),
                    quantity::bytes(bytes_max)
                )));
            }
        };
        let request = PullRequest {
            host: self.source.to_owned(),
            route: self.route.clone(),
            source: PullSource::Held(unit.name.clone()),
            // Each copy is a separate pull. Most pulls take less time than the registration of the arena with
            // libfabric.
            carriage: Carriage::connection(),
            target: self.service.copies.begin(self.source, &unit.name)?,
            cut: false,
            patience: Duration::ZERO,
            bytes_max: Some(bytes),
        };
        Ok(Step::Pull { request, room })
    }

    fn tick(&mut self, link: &mut Link) -> Result<(), PullError> {
        link.beat_if_due()
    }

    fn finish_copy(
        &mut self,
        link: &mut Link,
        unit: &Unit,
        outcome: Outcome,
        elapsed: Duration,
    ) -> Result<(), PullError> {
        // A file was changed during the pull. A later round copies the new state.
        if !outcome.changed.is_empty() {
            return self.abandon_copy(unit);
        }
        let record = Record {
            unit: unit.name.clone(),
            arena: link.arena.clone(),
            incarnation: link.incarnation.clone(),
            entries: outcome.entries,
        };
        self.service.copies.finish(self.source, &record)?;
        self.service.log.say(Level::Event, || {
            let mib = outcome.bytes as f64 / MIB;
            let seconds = elapsed.as_secs_f64();
            format!(
                "copied {} of {}: {} files, {mib:.1} MiB in {seconds:.2} s",
                unit.name, self.source, outcome.files
            )
        });
        link.mark(&record.unit, &record.entries)
    }

    fn abandon_copy(&mut self, unit: &Unit) -> Result<(), PullError> {
        self.service.copies.abandon(self.source, &unit.name)
    }

    fn describe_failure(&self, unit: &Unit, error: &PullError) -> String {
        format!("{} cannot copy {}: {error}", self.service.host, unit.name)
    }

    /// Removes copies of units that the source no longer holds.
    ///
    /// If the source has the same arena, such a unit was drained or removed. If it has another arena, the unit may be
    /// lost at the source. The copy is then removed only if the backing has all of its bytes.
    fn remove_unneeded(
        &mut self,
        link: &mut Link,
        units: &[Unit],
    ) -> Result<Vec<PullError>, PullError> {
        let held: BTreeSet<_> = units.iter().map(|unit| &unit.name).collect();
        for copy in self.service.copies.copies_of(self.source) {
            let unit = &copy.record.unit;
            if held.contains(unit) {
                continue;
            }
            let path = self.service.mount_point.join(unit);
            let is_unneeded = copy.record.arena == link.arena
                || (link.compared.insert(unit.clone())
                    && copy.is_in(&path, &mut || link.beat_if_due())?);
            if is_unneeded {
                self.service.copies.remove(self.source, unit)?;
                self.service.log.say(Level::Event, || {
                    let shown = quoted_path(Path::new(unit.as_path()));
                    let source = self.source;
                    format!(
                        "removed the copy of {shown} of {source}, which does not hold it any more"
                    )
                });
            }
        }
        Ok(Vec::new())
    }

    fn show_problem(&mut self, problem: &str) {
        let source = self.source;
        self.service
            .log
            .say(Level::Event, || format!("partner of {source}: {problem}"));
    }

    /// Sends the first problem as a note, because the status of the source has one note.
    fn report_to_source(&mut self, link: &mut Link, problems: &[String]) -> Result<(), PullError> {
        let note = match problems {
            [] => String::new(),
            [problem] => problem.clone(),
            [problem, others @ ..] => format!("{problem} (and {} more)", others.len()),
        };
        if note != link.note {
            link.peer.note(&note)?;
            link.note = note;
        }
        Ok(())
    }

    fn wait(&mut self, link: &mut Link, round: RoundReport) -> Result<(), PullError> {
        let shortest = if round.is_settling {
            SETTLE_INTERVAL
        } else {
            ROUND_INTERVAL
        };
        let pause = (PAUSE_PER_LIST_TIME * round.list_time).clamp(shortest, ROUND_INTERVAL_MAX);
        let deadline = Instant::now() + pause;
        loop {
            let rest = deadline.saturating_duration_since(Instant::now());
            std::thread::sleep(rest.min(BEAT_INTERVAL));
            if rest <= BEAT_INTERVAL {
                return Ok(());
            }
            link.peer.beat()?;
        }
    }
}

impl CopyHeld<'_> {
    /// Tries to keep a copy that was made under an earlier firnd of the source. The numbers of changes in its record
    /// have no meaning for the present firnd.
    ///
    /// If each held file has the same bytes as the copy, the copy gets a new record, and the held entries are returned.
    /// Returns `None` if the copy must be made again.
    fn renew(
        &mut self,
        link: &mut Link,
        copy: &Copy,
        unit: &BytePath,
    ) -> Result<Option<Vec<Entry>>, PullError> {
        if copy.record.incarnation == link.incarnation {
            return Ok(None);
        }
        let mut peer = Peer::connect(self.source, &self.route)?;
        let (top, entries) = match peer.list_held(unit) {
            Err(PullError::Remote {
                kind: ErrorKind::Missing,
                ..
            }) => return Ok(None),
            listed => listed?,
        };
        if !copy.record.has_same_shape(&entries) {
            return Ok(None);
        }
        for entry in entries.iter().filter(|entry| entry.held.is_some()) {
            let Ok(local) = copy.open(entry.path.as_path()) else {
                return Ok(None);
            };
            if !is_same_file(&mut peer, &top, entry, &local, &mut || link.beat_if_due())? {
                return Ok(None);
            }
        }
        let record = copy.record.renewed(&link.incarnation, &entries);
        self.service.copies.renew(self.source, &record)?;
        self.service.log.say(Level::Event, || {
            let source = self.source;
            format!("the copy of {unit} of {source} still has the bytes that {source} holds: nothing is copied again")
        });
        Ok(Some(entries))
    }

    /// Explains why a copy of a lost arena is not replaced, and how a user can fetch it.
    fn describe_needed(&self, name: &BytePath) -> String {
        let host = &self.service.host;
        let source = self.source;
        format!(
            "{host} keeps the copy of {name} from an arena that {source} lost, and copies nothing newer of that name: fetch it with `firn \
             pull {host}:{source}/{name}` or `firn run --restart {source}`"
        )
    }
}

/// Whether a copy of a lost arena has files that the source does not hold and whose bytes the backing does not have.
fn is_needed(
    copy: &Copy,
    unit: &Unit,
    mount_point: &Path,
    link: &mut Link,
) -> Result<bool, PullError> {
    let others = copy.record.files_not_in(&unit.entries);
    let path = mount_point.join(&unit.name);
    let are_in_backing = copy.has_files_in(&others, &path, &mut || link.beat_if_due())?;
    Ok(!are_in_backing)
}
