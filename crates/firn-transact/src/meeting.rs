//! Several hosts, one backing: they meet in the backing and decide together.
//!
//! Each host has its transactions in a directory of its own. To commit, every host prepares its part and
//! publishes what it read and wrote; when all lists are there each host tests them, and whoever is first
//! puts the verdict. With a verdict of no conflict any host may decide, once for all; each carries its part
//! out then, also after a crash, and says that it is done.
//!
//! ```text
//! .firn/meet-ID[-SCOPE]/     one meeting; SCOPE stands for the path of the scope
//!   from-HOST                what a host read and wrote: `firn_conflict::Published`
//!   verdict                  JSON: whether that goes together; put once
//!   outcome                  JSON: commit or abort, and who said so; put once
//!   done-HOST                the host has carried the outcome out
//! ```
//!
//! Whatever is put once is linked into its place, which one host alone can do on any file system. The
//! directory goes when all hosts that came have left.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_backing::{Backing, Errno};
use firn_conflict::{Accesses, File, Name, Process, Published, Ranges, Report, Used};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::backing::Inode;
use crate::own::OwnError;
use crate::record::{Item, Place, Record};
use crate::scope::{Held, HeldError, Scope, Stage};
use crate::staging;

const MEET: &str = "meet-";
const FROM: &str = "from-";
const DONE: &str = "done-";
const VERDICT: &str = "verdict";
const OUTCOME: &str = "outcome";
/// Before the name of what is not in its place yet.
const PUT: &str = "put-";

/// The hosts that commit together, as one of them sees them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// This host.
    pub host: String,
    /// All of them.
    pub participants: Participants,
}

impl Group {
    /// Path of the directory of what this host's transactions keep, relative to the backing.
    pub fn home(&self) -> String {
        format!("{}/{}{}", staging::TOP, staging::HOST, self.host)
    }
}

/// How the hosts of a group are told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Participants {
    /// So many, whoever comes.
    Count(usize),
    /// These, by name.
    Hosts(Vec<String>),
}

/// What the hosts found when all had come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Nobody stands in another's way.
    Clear,
    /// Somebody does.
    Conflict(Report),
    /// Not all came, or one left.
    GivenUp {
        /// By which host.
        by: String,
        /// What it said.
        why: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) commit: bool,
    pub(crate) by: String,
}

/// How far a meeting is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meeting {
    /// Some hosts have not come.
    Waiting {
        /// Those that have.
        here: Vec<String>,
        /// How many it will be.
        of: usize,
        /// The names of the others, where they are known.
        missing: Vec<String>,
    },
    /// All came, or somebody gave it up.
    Met(Verdict),
}

fn meeting_name(id: u64, scope: &[u8]) -> String {
    scoped_name(&format!("{MEET}{id}"), scope)
}

/// A name that stands for a scope.
pub(crate) fn scoped_name(name: &str, scope: &[u8]) -> String {
    match scope {
        b"" => name.into(),
        scope => format!("{name}-{:08x}{:x}", crc32c::crc32c(scope), scope.len()),
    }
}

/// The directory of a meeting, or of what the hosts of a shadow transaction share.
pub(crate) struct MeetingPlace<'a, B: Backing> {
    pub(crate) base: &'a B,
    pub(crate) top: B::Inode,
    pub(crate) name: String,
    pub(crate) dir: B::Inode,
    pub(crate) group: &'a Group,
}

impl<B: Backing> MeetingPlace<'_, B> {
    pub(crate) fn names(&self) -> Result<BTreeSet<String>, Errno> {
        let names = staging::list(self.base, &self.dir)?.into_iter();
        Ok(names
            .map(|(name, ..)| String::from_utf8_lossy(&name).into_owned())
            .collect())
    }

    /// This host's name behind `what`.
    pub(crate) fn mine(&self, what: &str) -> String {
        format!("{what}{}", self.group.host)
    }

    /// The hosts that have come as far as `what`.
    pub(crate) fn hosts(&self, what: &str) -> Result<Vec<String>, Errno> {
        Ok(self
            .names()?
            .iter()
            .filter_map(|name| name.strip_prefix(what))
            .map(Into::into)
            .collect())
    }

    /// Those of them that have not come as far as `next`.
    pub(crate) fn hosts_without(&self, what: &str, next: &str) -> Result<Vec<String>, Errno> {
        let names = self.names()?;
        let hosts = names.iter().filter_map(|name| name.strip_prefix(what));
        Ok(hosts
            .filter(|host| !names.contains(&format!("{next}{host}")))
            .map(Into::into)
            .collect())
    }

    pub(crate) fn get<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, Errno> {
        let Some(bytes) = staging::load(self.base, &self.dir, name)? else {
            return Ok(None);
        };
        serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|_| Errno::IO)
    }

    /// Puts a file where there is none, durably; whether it was this one.
    pub(crate) fn put(&self, name: &str, bytes: &[u8]) -> Result<bool, Errno> {
        // Beside those of other hosts and of other threads of this one, and none of the names that count. `firn
        // abort` and the thread that follows other hosts' aborts may put the same at once.
        static PUTS: AtomicU64 = AtomicU64::new(0);
        let number = PUTS.fetch_add(1, Ordering::Relaxed);
        let mine = format!("{PUT}{name}.{}.{number}", self.group.host);
        staging::write(self.base, &self.dir, &mine, bytes)?;
        let new = staging::new_name(&mine);
        let inode = self.base.lookup(&self.dir, OsStr::new(&new))?.0;
        let linked = self.base.link(&inode, &self.dir, OsStr::new(name));
        self.base.unlink(&self.dir, OsStr::new(&new))?;
        let first = match linked {
            Ok(_) => true,
            Err(Errno::EXIST) => false,
            Err(errno) => return Err(errno),
        };
        self.base.sync_dir(&self.dir)?;
        Ok(first)
    }

    pub(crate) fn put_json(&self, name: &str, value: &impl Serialize) -> Result<bool, Errno> {
        let mut bytes = serde_json::to_vec_pretty(value).expect("plain data");
        bytes.push(b'\n');
        self.put(name, &bytes)
    }

    /// Whether there is nothing left to be found out or decided.
    fn is_decided(&self) -> Result<bool, Errno> {
        let failed = !matches!(self.get(VERDICT)?, None | Some(Verdict::Clear));
        Ok(failed || self.get::<Outcome>(OUTCOME)?.is_some())
    }

    /// This host has done its part. The directory goes with the last one.
    fn leave(&self) -> Result<(), Errno> {
        self.put(&self.mine(DONE), b"")?;
        self.remove_if_over()
    }

    fn remove_if_over(&self) -> Result<(), Errno> {
        let names = self.names()?;
        let gone = |name: &String| {
            name.strip_prefix(FROM)
                .is_none_or(|host| names.contains(&format!("{DONE}{host}")))
        };
        // Without lists it is what a removal left that did not end, but for one that just begins. With them, nobody
        // is done before there is a decision, which may have gone in such a removal.
        let ended = || {
            let some = |what: &str| names.iter().any(|name| name.starts_with(what));
            let over = if some(FROM) { some(DONE) } else { !some(PUT) };
            Ok::<_, Errno>(over || self.is_decided()?)
        };
        if !names.iter().all(gone) || !ended()? {
            return Ok(());
        }
        // The lists first: without them the rest means nothing, while a list alone would be one of a meeting that
        // is not over.
        let remove = || {
            for name in names.iter().filter(|name| name.starts_with(FROM)) {
                self.base.unlink(&self.dir, OsStr::new(name))?;
            }
            self.base.sync_dir(&self.dir)?;
            // Then the verdict: alone it would be one for the next meeting.
            if names.contains(VERDICT) {
                self.base.unlink(&self.dir, OsStr::new(VERDICT))?;
                self.base.sync_dir(&self.dir)?;
            }
            staging::clear(self.base, &self.dir)?;
            self.base.rmdir(&self.top, OsStr::new(&self.name))
        };
        match remove() {
            // Another one does the same.
            Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY | Errno::STALE) => Ok(()),
            Err(errno) => Err(errno),
        }
    }
}

impl<B: Backing> Held<B> {
    /// The hosts that commit together, if there are several.
    pub fn group(&self) -> Option<&Group> {
        self.group.as_ref()
    }

    /// The directory of what this host's transactions keep, made if it is not there.
    pub(crate) fn home(&self) -> Result<B::Inode, OwnError> {
        let top = staging::dir(&self.base, &self.base.root(), staging::TOP)?;
        match self.host_home() {
            None => Ok(top),
            Some(name) => {
                staging::dir(&self.base, &top, &name).map_err(|error| error.below(staging::TOP))
            }
        }
    }

    /// `.firn/`, if it is there.
    pub(crate) fn find_top(&self) -> Result<Option<B::Inode>, OwnError> {
        let found = staging::find_dir(&self.base, &self.base.root(), staging::TOP)?;
        Ok(found.map(|(inode, _)| inode))
    }

    /// [`Held::home`], if it is there.
    pub(crate) fn find_home(&self) -> Result<Option<B::Inode>, OwnError> {
        let Some(top) = self.find_top()? else {
            return Ok(None);
        };
        match self.host_home() {
            None => Ok(Some(top)),
            Some(name) => {
                let found = staging::find_dir(&self.base, &top, &name);
                Ok(found
                    .map_err(|error| error.below(staging::TOP))?
                    .map(|(inode, _)| inode))
            }
        }
    }

    /// Its path, for people.
    pub(crate) fn home_path(&self) -> String {
        self.group
            .as_ref()
            .map_or_else(|| staging::TOP.into(), Group::home)
    }

    fn host_home(&self) -> Option<String> {
        self.group
            .as_ref()
            .map(|group| format!("{}{}", staging::HOST, group.host))
    }

    /// Makes durable where the directory of a transaction is found.
    pub(crate) fn sync_home(&self) -> Result<(), Errno> {
        self.base.sync_dir(&self.home()?)?;
        if self.group.is_some() {
            self.base
                .sync_dir(&staging::dir(&self.base, &self.base.root(), staging::TOP)?)?;
        }
        self.base.sync_dir(&self.base.root())
    }

    fn place(
        &self,
        id: u64,
        scope: &[u8],
        make: bool,
    ) -> Result<Option<MeetingPlace<'_, B>>, Errno> {
        let Some(group) = &self.group else {
            return Ok(None);
        };
        let name = meeting_name(id, scope);
        let top = staging::dir(&self.base, &self.base.root(), staging::TOP)?;
        let dir = match make {
            true => {
                let dir = staging::dir(&self.base, &top, &name)?;
                self.base.sync_dir(&top)?;
                dir
            }
            false => match staging::find_dir(&self.base, &top, &name)? {
                Some((dir, _)) => dir,
                None => return Ok(None),
            },
        };
        Ok(Some(MeetingPlace {
            base: &self.base,
            top,
            name,
            dir,
            group,
        }))
    }

    /// Which files processes of this host used up to the moment at which the transaction was prepared.
    pub fn note_used(&self, inode: &Inode<B>, used: Vec<Used>) -> Result<(), HeldError> {
        *self.scope_at(inode)?.used.lock() = Some(used);
        Ok(())
    }

    /// Tells the other hosts what this one read and wrote in the transaction that is prepared with `id`. Fails with
    /// [`HeldError::Leaving`] while an earlier meeting about the same number is not over.
    pub fn publish(&self, inode: &Inode<B>, id: u64) -> Result<(), HeldError> {
        let scope = self.scope_at(inode)?;
        let Some(group) = &self.group else {
            return Ok(());
        };
        let place = self
            .place(id, &scope.path, true)?
            .expect("there is a group");
        let names = place.names()?;
        let mine = place.mine(FROM);
        let left = place.mine(DONE);
        if names.contains(&left) {
            place.remove_if_over()?;
            return Err(HeldError::Leaving { id });
        }
        if names.contains(&mine) {
            return Ok(());
        }
        let used = scope.used.lock();
        // Nothing is tested in shadow mode.
        let nothing = Vec::new();
        let shared = self.shared(&scope.path)?.map(|_| &nothing);
        let Some(used) = used.as_ref().or(shared) else {
            let why =
                "its firnd was restarted before it had told what its programs read".to_owned();
            self.give_up(id, &scope.path, why)?;
            return Ok(());
        };
        let record =
            self.load_record(&scope.dir, &format!("tx-{}", scope.serial), staging::RECORD)?;
        let record = record.ok_or(HeldError::NotMet { id })?;
        let list = self.published(group, &record, used)?;
        match place.put(&mine, &list.encode()) {
            // Somebody removed what was left of an earlier meeting.
            Err(Errno::NOENT | Errno::STALE) => Err(HeldError::Leaving { id }),
            put => Ok(put.map(drop)?),
        }
    }

    /// What a record and the accesses of programs come to.
    fn published(&self, group: &Group, record: &Record, used: &[Used]) -> Result<Published, Errno> {
        let mut list = Published {
            host: group.host.clone(),
            ..Published::default()
        };
        let items: BTreeMap<u64, &Item> = record
            .items
            .iter()
            .map(|item| (item.number, item))
            .collect();
        let Inode::Tracked(top) = self.top() else {
            return Ok(list);
        };
        let top_ino = top.key.1;
        let ino = |number: u64| match number {
            0 => Some(top_ino),
            number => items
                .get(&number)
                .filter(|item| item.new_at.is_none())
                .map(|item| item.identity.ino),
        };
        let name = |place: &Place| {
            ino(place.0).map(|dir| Name {
                dir,
                name: place.1.clone(),
            })
        };
        let mut names: BTreeSet<Name> = BTreeSet::new();
        let mut files: BTreeMap<u64, (Vec<u8>, BTreeMap<u32, Accesses>)> = BTreeMap::new();
        let is_new: BTreeSet<u64> = items
            .values()
            .filter(|item| item.new_at.is_some())
            .map(|item| item.identity.ino)
            .collect();
        let mut directories = Directories {
            base: &self.base,
            known: HashMap::new(),
        };
        for file in used.iter().filter(|file| !is_new.contains(&file.ino)) {
            directories.names_of(&file.path, top_ino, &mut names)?;
            let known = files
                .entry(file.ino)
                .or_insert_with(|| (file.path.clone(), BTreeMap::new()));
            for (pid, accesses) in &file.processes {
                let entry = known.1.entry(*pid).or_default();
                entry.read.extend(&accesses.read);
                entry.written.extend(&accesses.written);
            }
        }
        for item in &record.items {
            let path = path_of(item.number, &items);
            for place in item.leaves.iter().chain(&item.comes) {
                list.changed.extend(
                    name(place).map(|name| (name, join(&path_of(place.0, &items), &place.1))),
                );
            }
            if item.new_at.is_some() {
                continue;
            }
            names.extend(item.stays.iter().chain(&item.leaves).filter_map(name));
            if item.attributes {
                list.attributes.push((item.identity.ino, path.clone()));
            }
            if let Some(data) = &item.data {
                let known = files
                    .entry(item.identity.ino)
                    .or_insert_with(|| (path, BTreeMap::new()));
                let mut seen = Ranges::default();
                known
                    .1
                    .values()
                    .for_each(|accesses| seen.extend(&accesses.written));
                // What nobody is known to have written counts all the same, and so does what was cut off.
                let cut = (!data.grows).then_some((data.cut, u64::MAX));
                for (start, end) in data.written.iter().copied().chain(cut) {
                    let (until, inside) = seen.stretch(start);
                    if !inside || until < end {
                        known.1.entry(0).or_default().written.insert(start..end);
                    }
                }
            }
        }
        list.used = names.into_iter().collect();
        let process = |(pid, accesses): (&u32, &Accesses)| {
            Process::new(*pid, &accesses.read, &accesses.written)
        };
        let file = |(ino, (path, processes)): (u64, (Vec<u8>, BTreeMap<u32, Accesses>))| {
            let processes = processes.iter().map(process).collect();
            File {
                ino,
                path,
                processes,
            }
        };
        list.files = files.into_iter().map(file).collect();
        Ok(list)
    }

    /// Looks whether all hosts have come, and finds the verdict if they have.
    pub fn meet(&self, id: u64, scope: &[u8]) -> Result<Meeting, HeldError> {
        let Some(group) = &self.group else {
            return Ok(Meeting::Met(Verdict::Clear));
        };
        let Some(place) = self.place(id, scope, false)? else {
            return Err(HeldError::NotMet { id });
        };
        if let Some(Outcome { commit: false, by }) = place.get(OUTCOME)? {
            let why = "it aborted its part".to_owned();
            return Ok(Meeting::Met(Verdict::GivenUp { by, why }));
        }
        let shared = self.shared(scope)?;
        if let Some(Outcome { commit: false, by }) = shared
            .as_ref()
            .map(|shared| shared.outcome())
            .transpose()?
            .flatten()
        {
            let why = "it aborted the transaction".to_owned();
            return Ok(Meeting::Met(Verdict::GivenUp { by, why }));
        }
        if let Some(verdict) = place.get(VERDICT)? {
            return Ok(Meeting::Met(verdict));
        }
        let here = place.hosts(FROM)?;
        let (of, missing) = match &group.participants {
            Participants::Count(count) => {
                // All that changed something are to be prepared.
                let members = shared.map_or(Ok(Vec::new()), |shared| shared.members())?;
                (
                    *count,
                    members
                        .into_iter()
                        .filter(|host| !here.contains(host))
                        .collect::<Vec<_>>(),
                )
            }
            Participants::Hosts(hosts) => (
                hosts.len(),
                hosts
                    .iter()
                    .filter(|host| !here.contains(host))
                    .cloned()
                    .collect(),
            ),
        };
        if here.len() < of || !missing.is_empty() {
            return Ok(Meeting::Waiting { here, of, missing });
        }
        let verdict = if here.len() > of {
            let why = format!(
                "{} hosts came, {}, where {of} take part",
                here.len(),
                here.join(", ")
            );
            Verdict::GivenUp {
                by: group.host.clone(),
                why,
            }
        } else {
            let mut lists = Vec::new();
            for host in &here {
                let bytes = staging::load(&self.base, &place.dir, &format!("{FROM}{host}"))?;
                let list = Published::decode(&bytes.unwrap_or_default());
                lists.push(list.map_err(|source| HeldError::List {
                    host: host.clone(),
                    source,
                })?);
            }
            match firn_conflict::test(&lists) {
                report if report.total == 0 => Verdict::Clear,
                report => Verdict::Conflict(report),
            }
        };
        place.put_json(VERDICT, &verdict)?;
        // Whoever was first: that one counts.
        place
            .get(VERDICT)?
            .map(Meeting::Met)
            .ok_or(HeldError::NotMet { id })
    }

    /// Puts an end to a meeting that has no verdict yet.
    pub fn give_up(&self, id: u64, scope: &[u8], why: String) -> Result<(), HeldError> {
        let (Some(group), Some(place)) = (&self.group, self.place(id, scope, false)?) else {
            return Ok(());
        };
        place.put_json(
            VERDICT,
            &Verdict::GivenUp {
                by: group.host.clone(),
                why,
            },
        )?;
        Ok(())
    }

    /// Decides for all hosts that there is no commit; fails with [`HeldError::Decided`] where there is one. Does
    /// nothing if this host's part is not prepared any more: somebody else has ended it.
    pub fn call_off(&self, id: u64, scope: &[u8]) -> Result<(), HeldError> {
        let _stays = self.leaving.lock();
        let is_prepared = |one: &Scope<B>| one.path == scope && one.stage() == Stage::Prepared(id);
        match self.scopes_where(is_prepared).is_empty() {
            true => Ok(()),
            false => self.decide(id, scope, false),
        }
    }

    /// Decides for all hosts, if nobody has: whether the outcome is the one that is wanted. A commit needs a verdict
    /// of no conflict.
    pub(crate) fn decide(&self, id: u64, scope: &[u8], commit: bool) -> Result<(), HeldError> {
        let Some(group) = &self.group else {
            return Ok(());
        };
        let Some(place) = self.place(id, scope, !commit)? else {
            return Err(HeldError::NotMet { id });
        };
        if commit {
            match place.get(VERDICT)? {
                None => return Err(HeldError::NotMet { id }),
                Some(Verdict::Clear) => {}
                Some(verdict) => return Err(refused(verdict)),
            }
        } else if matches!(
            place.get(VERDICT)?,
            Some(Verdict::Conflict(_) | Verdict::GivenUp { .. })
        ) {
            return Ok(());
        }
        // What counts is said where it was saved: a host may abort that has not come to this meeting.
        if let Some(shared) = self.shared(scope)? {
            match shared.settle(commit)? {
                Outcome { commit: found, .. } if found == commit => {}
                Outcome { commit: true, .. } => return Err(HeldError::Decided { id }),
                Outcome { by, .. } => {
                    return Err(HeldError::GivenUp {
                        by,
                        why: "it aborted the transaction".into(),
                    });
                }
            }
        }
        place.put_json(
            OUTCOME,
            &Outcome {
                commit,
                by: group.host.clone(),
            },
        )?;
        match place.get(OUTCOME)? {
            Some(Outcome { commit: found, .. }) if found == commit => Ok(()),
            Some(Outcome { commit: true, .. }) => Err(HeldError::Decided { id }),
            Some(Outcome { by, .. }) => Err(HeldError::GivenUp {
                by,
                why: "it aborted its part".into(),
            }),
            None => Err(HeldError::NotMet { id }),
        }
    }

    /// What was decided about a transaction that this host had prepared: `None` where nothing is.
    pub(crate) fn decided(&self, id: u64, scope: &[u8]) -> Result<Option<bool>, Errno> {
        let Some(place) = self.place(id, scope, false)? else {
            return Ok(None);
        };
        Ok(place.get::<Outcome>(OUTCOME)?.map(|outcome| outcome.commit))
    }

    /// This host has carried out what was decided.
    pub(crate) fn leave(&self, id: u64, scope: &[u8]) -> Result<(), Errno> {
        let _leaving = self.leaving.lock();
        self.place(id, scope, false)?
            .map_or(Ok(()), |place| place.leave())
    }

    /// Before an end of a transaction that was not prepared: others may wait for this host in vain.
    pub(crate) fn withdraw(&self, scope: &[u8]) -> Result<(), HeldError> {
        for id in self.meetings(scope)? {
            let Some(place) = self.place(id, scope, false)? else {
                continue;
            };
            if !place.names()?.contains(&place.mine(FROM)) && !place.is_decided()? {
                self.decide(id, scope, false)?;
            }
        }
        Ok(())
    }

    /// After a crash: meetings in which this host has nothing to do any more are left. `waiting`: those about
    /// transactions that it has.
    pub(crate) fn leave_old(&self, waiting: &[(u64, Vec<u8>)]) -> Result<(), Errno> {
        let Some(group) = &self.group else {
            return Ok(());
        };
        let Some(top) = self.find_top()? else {
            return Ok(());
        };
        let kept: Vec<String> = waiting
            .iter()
            .map(|(id, scope)| meeting_name(*id, scope))
            .collect();
        for (name, ..) in staging::list(&self.base, &top)? {
            let name = String::from_utf8_lossy(&name).into_owned();
            if !name.starts_with(MEET) || kept.contains(&name) {
                continue;
            }
            let Some((dir, _)) = staging::find_dir(&self.base, &top, &name)? else {
                continue;
            };
            let place = MeetingPlace {
                base: &self.base,
                top: top.clone(),
                name,
                dir,
                group,
            };
            let names = place.names()?;
            let mine = place.mine(FROM);
            let left = place.mine(DONE);
            if names.contains(&mine) && !names.contains(&left) && place.is_decided()? {
                place.leave()?;
            } else {
                place.remove_if_over()?;
            }
        }
        Ok(())
    }

    /// Hosts that have not carried out a commit yet.
    pub fn behind(&self, id: u64, scope: &[u8]) -> Result<Vec<String>, Errno> {
        let Some(place) = self.place(id, scope, false)? else {
            return Ok(Vec::new());
        };
        match place.hosts_without(FROM, DONE) {
            // It went meanwhile.
            Err(Errno::NOENT | Errno::STALE) => Ok(Vec::new()),
            hosts => hosts,
        }
    }

    /// The numbers of the meetings about a scope.
    fn meetings(&self, scope: &[u8]) -> Result<Vec<u64>, Errno> {
        if self.group.is_none() {
            return Ok(Vec::new());
        }
        let Some(top) = self.find_top()? else {
            return Ok(Vec::new());
        };
        let id = |name: Vec<u8>| {
            let text = String::from_utf8(name).ok()?;
            let id = text.strip_prefix(MEET)?.split('-').next()?.parse().ok()?;
            (meeting_name(id, scope) == text).then_some(id)
        };
        Ok(staging::list(&self.base, &top)?
            .into_iter()
            .filter_map(|(name, ..)| id(name))
            .collect())
    }

    /// Back from prepared to open, with all that was changed: the other hosts do not agree, or did not come.
    /// Returns what [`Held::note_used`] was told.
    pub fn reopen(&self, inode: &Inode<B>, id: u64) -> Result<Vec<Used>, HeldError> {
        let scope = self.scope_at(inode)?;
        let _names = self.tree.write();
        let _data = self.data.write();
        match scope.stage() {
            Stage::Prepared(found) if found == id => {}
            Stage::Prepared(found) | Stage::Decided(found) => {
                return Err(HeldError::OtherId { found, wanted: id });
            }
            Stage::Open => return Ok(Vec::new()),
            Stage::Ended => return Err(HeldError::None),
        }
        // Its changes are in the record only.
        if scope.recovered.is_some() {
            return Err(HeldError::GivenUp {
                by: self.host_name(),
                why: "its firnd was restarted".into(),
            });
        }
        // Where all is in the backing nothing may change once the others have agreed.
        if self.shared(&scope.path)?.is_some()
            && let Some(place) = self.place(id, &scope.path, false)?
        {
            place.put_json(
                VERDICT,
                &Verdict::GivenUp {
                    by: self.host_name(),
                    why: "it failed there".into(),
                },
            )?;
            let is_aborted = place
                .get::<Outcome>(OUTCOME)?
                .is_some_and(|outcome| !outcome.commit);
            if place.get(VERDICT)? == Some(Verdict::Clear) && !is_aborted {
                return Err(HeldError::Decided { id });
            }
        }
        self.base.unlink(&scope.dir, OsStr::new(staging::RECORD))?;
        self.base.sync_dir(&scope.dir)?;
        scope.turn(Stage::Open);
        self.leave(id, &scope.path)?;
        Ok(scope.used.lock().take().unwrap_or_default())
    }

    /// The hosts that have come to a meeting.
    pub fn here(&self, id: u64, scope: &[u8]) -> Result<Vec<String>, Errno> {
        self.place(id, scope, false)?
            .map_or(Ok(Vec::new()), |place| place.hosts(FROM))
    }

    fn host_name(&self) -> String {
        self.group
            .as_ref()
            .map_or_else(String::new, |group| group.host.clone())
    }

    /// For [`Held::commit`]: all hosts agree, which is durable then.
    pub(crate) fn agree(&self, scope: &Scope<B>, stage: Stage, id: u64) -> Result<(), HeldError> {
        match stage {
            Stage::Open if self.group.is_some() => Err(HeldError::NotMet { id }),
            Stage::Prepared(_) => self.decide(id, &scope.path, true),
            _ => Ok(()),
        }
    }
}

/// Why there is no commit.
pub(crate) fn refused(verdict: Verdict) -> HeldError {
    match verdict {
        Verdict::Conflict(report) => HeldError::Conflict(Box::new(report)),
        Verdict::GivenUp { by, why } => HeldError::GivenUp { by, why },
        Verdict::Clear => HeldError::None,
    }
}

impl Verdict {
    /// `Err` with the reason where it is none of agreement.
    pub fn agreed(self) -> Result<(), HeldError> {
        if self == Self::Clear {
            Ok(())
        } else {
            Err(refused(self))
        }
    }
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() {
        name.to_vec()
    } else {
        [dir, b"/", name].concat()
    }
}

/// A path of an object of a record, relative to the backing.
fn path_of(number: u64, items: &BTreeMap<u64, &Item>) -> Vec<u8> {
    fn below(number: u64, items: &BTreeMap<u64, &Item>, depth: usize) -> Vec<u8> {
        let item = items.get(&number).filter(|_| number != 0 && depth < 1000);
        let place = item.and_then(|item| {
            item.stays
                .iter()
                .chain(&item.leaves)
                .chain(&item.comes)
                .next()
        });
        place.map_or_else(Vec::new, |(dir, name)| {
            join(&below(*dir, items, depth + 1), name)
        })
    }
    below(number, items, 0)
}

/// Directories of the backing on the way to files that were used.
struct Directories<'a, B: Backing> {
    base: &'a B,
    /// The directory and its inode; `None`: it is not there, so this host has changed its name.
    known: HashMap<Vec<u8>, Option<(B::Inode, u64)>>,
}

impl<B: Backing> Directories<'_, B> {
    fn find(
        &mut self,
        path: &[u8],
        top: u64,
        names: &mut BTreeSet<Name>,
    ) -> Result<Option<(B::Inode, u64)>, Errno> {
        if let Some(found) = self.known.get(path) {
            return Ok(found.clone());
        }
        let found = if path.is_empty() {
            Some((self.base.root(), top))
        } else {
            let (above, name) = split(path);
            match self.find(above, top, names)? {
                None => None,
                Some((dir, ino)) => {
                    names.insert(Name {
                        dir: ino,
                        name: name.to_vec(),
                    });
                    let name = <OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(name);
                    match staging::find(self.base, &dir, name) {
                        Ok(found) => found.map(|(inode, attr)| (inode, attr.ino)),
                        Err(Errno::NOTDIR) => None,
                        Err(errno) => return Err(errno),
                    }
                }
            }
        };
        self.known.insert(path.to_vec(), found.clone());
        Ok(found)
    }

    /// The names that lead to a file.
    fn names_of(&mut self, path: &[u8], top: u64, names: &mut BTreeSet<Name>) -> Result<(), Errno> {
        let (above, name) = split(path);
        if let Some((_, dir)) = self.find(above, top, names)? {
            names.insert(Name {
                dir,
                name: name.to_vec(),
            });
        }
        Ok(())
    }
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b"", path),
    }
}
