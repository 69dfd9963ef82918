//! [`TransactionalBacking`]: a file system with transactions on its directories, as a layer over another file system.
//!
//! A file system below a mount or below such a layer is a *backing*. The *scope* of a transaction is what it covers;
//! the *top* is its uppermost directory. In *shadow mode* the backing has a transaction's changes at once.
//!
//! It is assembled from parts, each of which uses only parts before it in the list of fields. An operation that one
//! part can do is a method of that part.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::attributes::Objects;
use crate::backup::revive::Revival;
use crate::backup::rounds::Backups;
use crate::data::FileData;
use crate::difference::Differences;
use crate::history::History;
use crate::link_counts::LinkCounts;
use crate::listing::DirListings;
use crate::lower_backing::LowerBacking;
use crate::names_ballot::NamesBallots;
use crate::namespace::Namespace;
use crate::object::Object;
use crate::records::Endings;
use crate::recovery::Opening;
use crate::recovery::StoredScopes;
use crate::scopes::Scopes;
use crate::shadow::Mode;
use crate::shadow::save::Originals;
use crate::shadow::shared::SharedTransactions;
use crate::shadow::undo::ShadowUndo;
use crate::top_overlay::TopOverlay;
use crate::transaction::apply_commit::DecidedCommits;
use crate::transaction::arenas::ArenaNotes;
use crate::tree::Tree;
use crate::unanswered::Unanswered;
use crate::vote::Votes;
use crate::waiting::Admission;
use firn_backing::Backing;
use firn_backing::lock::Mutex;

/// A backing whose directories can be in a transaction.
///
/// The fields are its parts, from the lowest one up. Its methods are the operations that need many parts.
pub struct TransactionalBacking<B: Backing> {
    /// The backing below, and the directory in it where this mount keeps its transactions.
    pub lower: Arc<LowerBacking<B>>,
    pub(crate) tree: Arc<Tree<B>>,
    /// The transactions that have not ended.
    pub scopes: Arc<Scopes<B>>,
    pub(crate) link_counts: Arc<LinkCounts<B>>,
    pub(crate) shadow_undo: Arc<ShadowUndo<B>>,
    /// Names of tops of scopes in the directories above.
    pub top_overlay: Arc<TopOverlay<B>>,
    /// Admits threads that look up names, or change names or data.
    pub admission: Arc<Admission<B>>,
    /// The transactions in shadow mode that several hosts share.
    pub shared: Arc<SharedTransactions<B>>,
    /// Votes of several hosts on commits.
    pub votes: Arc<Votes<B>>,
    /// Ballots of several hosts on scopes of names.
    pub names_ballots: Arc<NamesBallots<B>>,
    pub(crate) arena_notes: Arc<ArenaNotes<B>>,
    /// The backup of transactions, if the mount has one.
    pub backups: Arc<Backups<B>>,
    /// The commits that can be undone.
    pub history: Arc<History<B>>,
    pub(crate) endings: Arc<Endings<B>>,
    pub(crate) objects: Arc<Objects<B>>,
    /// Bytes of files, as the backing has them and as transactions changed them.
    pub file_data: Arc<FileData<B>>,
    pub(crate) dir_listings: Arc<DirListings<B>>,
    pub(crate) differences: Arc<Differences<B>>,
    pub(crate) namespace: Arc<Namespace<B>>,
    pub(crate) stored_scopes: Arc<StoredScopes<B>>,
    pub(crate) commits: Arc<DecidedCommits<B>>,
    /// Prepares transactions again from their backups.
    pub revival: Arc<Revival<B>>,
    /// Mode of the transactions that begin from now on.
    pub(crate) mode: Mode,
    /// Name of the host that aborted the last transaction of a scope, by the path of the scope. Only aborts by other
    /// hosts are listed.
    pub(crate) stopped_by: Mutex<BTreeMap<Vec<u8>, String>>,
    /// Applied commits whose requests failed afterwards, by the path of the scope after the commit.
    pub(crate) unanswered: Mutex<BTreeMap<Vec<u8>, Unanswered>>,
}

impl<B: Backing> TransactionalBacking<B> {
    /// Puts the parts together, from the lowest one up.
    pub(crate) fn assemble(base: B, top: &Arc<Object<B>>, opening: Opening) -> Self {
        let lower = Arc::new(LowerBacking {
            base,
            members: opening.members,
            device: top.key.dev,
        });
        let tree = Arc::new(Tree::new(top));
        let scopes = Arc::new(Scopes::default());
        let link_counts = Arc::new(LinkCounts::new(&lower, &tree));
        let originals = Arc::new(Originals::new(&lower));
        let shadow_undo = Arc::new(ShadowUndo::new(&lower, &tree, &link_counts));
        let top_overlay = Arc::new(TopOverlay::new(&lower, &scopes, &link_counts));
        let admission = Arc::new(Admission::new(&tree, &scopes));
        let shared = Arc::new(SharedTransactions::new(&lower));
        let votes = Arc::new(Votes::new(&lower, &tree, &scopes, &shared));
        let names_ballots = Arc::new(NamesBallots::new(&lower));
        let arena_notes = Arc::new(ArenaNotes::new(
            &votes,
            &names_ballots,
            opening.arena,
            opening.living,
        ));
        let backups = Arc::new(Backups::new(&lower, &scopes));
        let history = Arc::new(History::new(&lower, &tree, &scopes, opening.history));
        let endings = Arc::new(Endings::new(
            &lower,
            &scopes,
            &link_counts,
            &history,
            &backups,
        ));
        let objects = Arc::new(Objects::new(
            &lower,
            &originals,
            &link_counts,
            &top_overlay,
            &admission,
        ));
        let file_data = Arc::new(FileData::new(&lower, &originals, &admission, &objects));
        let dir_listings = Arc::new(DirListings::new(&lower, &top_overlay, &admission));
        let differences = Arc::new(Differences::new(&lower, &tree, &link_counts));
        let namespace = Arc::new(Namespace::new(&objects, &dir_listings));
        let stored_scopes = Arc::new(StoredScopes::new(
            &lower,
            &tree,
            &scopes,
            &link_counts,
            &shared,
        ));
        let commits = Arc::new(DecidedCommits::new(
            &objects,
            &votes,
            &names_ballots,
            &endings,
        ));
        let revival = Arc::new(Revival::new(&lower, &scopes, &link_counts, &stored_scopes));
        Self {
            lower,
            tree,
            scopes,
            link_counts,
            shadow_undo,
            top_overlay,
            admission,
            shared,
            votes,
            names_ballots,
            arena_notes,
            backups,
            history,
            endings,
            objects,
            file_data,
            dir_listings,
            differences,
            namespace,
            stored_scopes,
            commits,
            revival,
            mode: Mode::Buffer,
            stopped_by: Mutex::default(),
            unanswered: Mutex::default(),
        }
    }

    /// Returns the mode of transactions that begin from now on.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns whether hosts search each other's access lists for conflicts before a commit.
    pub(crate) fn tests_conflicts(&self) -> bool {
        self.lower.members.is_some() && self.mode == Mode::Buffer
    }

    /// Sets the mode of transactions that begin from now on.
    #[must_use]
    pub fn in_mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// Returns the backing below.
    pub fn base(&self) -> &B {
        &self.lower.base
    }

    /// Drops all parts, and returns the backing below.
    pub fn into_base(self) -> B {
        let lower = Arc::clone(&self.lower);
        drop(self);
        Arc::into_inner(lower)
            .expect("only the parts share it, and they are gone")
            .base
    }
}
