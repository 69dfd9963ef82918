//! The partner's side: copies of what one other host holds, as long as that host says that this is its partner.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::backoff::Backoff;
use firn_format::quantity;
use firn_format::quote::quoted_path;
use firn_protocol::path::BytePath;

use crate::error::PullError;
use crate::follow::{Follower, LookReport, Policy, Step};
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

/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Time between two looks while a file was closed since the last look: if it is unchanged at the next one, it is
/// copied.
const SETTLE: Duration = Duration::from_millis(20);
/// A look that takes long is not made more often than this share of the time.
const LOOK_SHARE: u32 = 20;
const LOOK_EVERY_MAX: Duration = Duration::from_secs(5);
/// The source takes a partner that says nothing for longer for dead ([`crate::session`]).
const BEAT_EVERY: Duration = Duration::from_secs(2);
/// Between two tries to reach the source.
const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));
/// How long it is tried: the source calls again.
const RETRY_FOR: Duration = Duration::from_secs(60);

/// Follows until the source has another partner, or cannot be reached for long. Copies stay.
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

/// Copies all that a host holds, and marks it there.
struct CopyHeld<'a> {
    service: &'a Arc<PartnerService>,
    source: &'a str,
    route: Route,
}

/// The connection of a host that follows. What it marks ends with it.
struct Link {
    peer: Peer,
    /// The firnd that counts the changes.
    incarnation: String,
    arena: String,
    /// When this partner said something last while it was busy with something else.
    beaten_at: Instant,
    /// The note that the source has.
    noted: String,
    /// Copies of an earlier arena that were compared with the backing.
    compared: BTreeSet<BytePath>,
}

impl Link {
    /// Marks what is not marked yet.
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

    /// For what takes long: the source is to know that this partner lives.
    fn beat_if_due(&mut self) -> Result<(), PullError> {
        if self.beaten_at.elapsed() <= BEAT_EVERY {
            return Ok(());
        }
        self.beaten_at = Instant::now();
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
            beaten_at: Instant::now(),
            noted: String::new(),
            compared: BTreeSet::new(),
        })
    }

    fn is_over(&self, error: &PullError, unreached_for: Duration) -> bool {
        let is_refused = matches!(
            error,
            PullError::Remote {
                kind: ErrorKind::Refused,
                ..
            }
        );
        is_refused || unreached_for > RETRY_FOR
    }

    fn list(&mut self, link: &mut Link) -> Result<Vec<Unit>, PullError> {
        let (_, entries) = link.peer.list_held(&BytePath::default())?;
        let entries = check_entries(entries).map_err(|what| link.peer.implausible(what))?;
        Ok(group_by_name(&entries))
    }

    fn confirm_copy(&mut self, link: &mut Link, unit: &Unit) -> Result<bool, PullError> {
        let copy = self.service.copies.find(self.source, &unit.name);
        let is_of = |copy: Copy| copy.record.covers(&link.incarnation, &unit.entries);
        let is_whole = copy.is_some_and(is_of);
        if is_whole {
            link.mark(&unit.name, &unit.entries)?;
        }
        Ok(is_whole)
    }

    fn plan_copy(&mut self, link: &mut Link, unit: &Unit) -> Result<Step<Room>, PullError> {
        let copy = self.service.copies.find(self.source, &unit.name);
        if let Some(copy) = copy {
            let is_of_lost = copy.record.arena != link.arena;
            if is_of_lost && is_needed(&copy, unit, &self.service.mount_point, link)? {
                return Ok(Step::Refuse(self.describe_needed(&unit.name)));
            }
            if !is_of_lost && let Some(entries) = self.renew(link, &copy, &unit.name)? {
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
                    "{} has no room for {} of {}: {} of {} are in use (raise it with `firn agent --partner-size`)",
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
            // Each copy is a pull: to register the arena would take longer than most of them.
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
        // The next look finds it as it is then.
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
            let mib = outcome.bytes as f64 / f64::from(1 << 20);
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

    /// What the source does not hold any more was drained or removed, if it has the same arena still. If it has
    /// another one it may have lost it: then the backing is asked, once.
    fn remove_unneeded(
        &mut self,
        link: &mut Link,
        now: &[Unit],
    ) -> Result<Vec<PullError>, PullError> {
        let held: BTreeSet<_> = now.iter().map(|unit| &unit.name).collect();
        for copy in self.service.copies.copies_of(self.source) {
            let unit = &copy.record.unit;
            if held.contains(unit) {
                continue;
            }
            let path = self.service.mount_point.join(unit);
            let is_drained = copy.record.arena == link.arena
                || (link.compared.insert(unit.clone())
                    && copy.is_in(&path, &mut || link.beat_if_due())?);
            if is_drained {
                self.service.copies.remove(self.source, unit)?;
                self.service.log.say(Level::Event, || {
                    let shown = quoted_path(Path::new(unit.as_path()));
                    let source = self.source;
                    format!("removed {shown} of {source}: it does not hold it any more")
                });
            }
        }
        Ok(Vec::new())
    }

    fn tell_problem(&mut self, problem: &str) {
        let source = self.source;
        self.service
            .log
            .say(Level::Event, || format!("partner of {source}: {problem}"));
    }

    /// The source has room for one note.
    fn report_problems(&mut self, link: &mut Link, problems: &[String]) -> Result<(), PullError> {
        let note = match problems {
            [] => String::new(),
            [problem] => problem.clone(),
            [problem, others @ ..] => format!("{problem} (and {} more)", others.len()),
        };
        if note != link.noted {
            link.peer.note(&note)?;
            link.noted = note;
        }
        Ok(())
    }

    fn wait(&mut self, link: &mut Link, look: LookReport) -> Result<(), PullError> {
        let shortest = if look.is_settling { SETTLE } else { LOOK_EVERY };
        let pause = (LOOK_SHARE * look.listed_in).clamp(shortest, LOOK_EVERY_MAX);
        let deadline = Instant::now() + pause;
        loop {
            let rest = deadline.saturating_duration_since(Instant::now());
            std::thread::sleep(rest.min(BEAT_EVERY));
            if rest <= BEAT_EVERY {
                return Ok(());
            }
            link.peer.beat()?;
        }
    }
}

impl CopyHeld<'_> {
    /// Of a copy that an earlier firnd's files were made into: whether its bytes are those that this firnd holds. Then
    /// it is one of these. Returns what is held.
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
        if !copy.record.may_be_of(&entries) {
            return Ok(None);
        }
        for entry in entries.iter().filter(|entry| entry.held.is_some()) {
            let Ok(here) = copy.open(entry.path.as_path()) else {
                return Ok(None);
            };
            if !is_same_file(&mut peer, &top, entry, &here, &mut || link.beat_if_due())? {
                return Ok(None);
            }
        }
        let record = copy.record.renewed(&link.incarnation, &entries);
        self.service.copies.renew(self.source, &record)?;
        self.service.log.say(Level::Event, || {
            let source = self.source;
            format!("the copy of {unit} of {source} is as it holds it: nothing is copied anew")
        });
        Ok(Some(entries))
    }

    fn describe_needed(&self, name: &BytePath) -> String {
        let here = &self.service.host;
        let source = self.source;
        format!(
            "{here} keeps what an arena that {source} lost had of {name} and copies nothing newer of that name: take it with `firn \
             pull {here}:{source}/{name}` or `firn run --restart {source}`"
        )
    }
}

/// Whether a copy has files of an arena that is lost which are nowhere else.
fn is_needed(
    copy: &Copy,
    unit: &Unit,
    mount_point: &Path,
    link: &mut Link,
) -> Result<bool, PullError> {
    let others = copy.record.files_beside(&unit.entries);
    let path = mount_point.join(&unit.name);
    let is_there = copy.has_files_in(&others, &path, &mut || link.beat_if_due())?;
    Ok(!is_there)
}
