//! Opens the store of a mount, which is the backing directory with layers: the store below transactions, and the layer
//! of transactions above it. Transactions that a dead firnd (the process that serves a mount) has left are finished or
//! undone here.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::{Backing, DirBacking};
use firn_config::{Drain, Frontend, Mode};
use firn_engine::Resumed;
use firn_transact::{
    AbortError, LivingTransactions, Members, Opening, PlainBacking, RecoveryOutcome,
    TransactionError, TransactionalBacking,
};

use crate::arena_opening::FoundArena;
use crate::commit_rules;
use crate::error::AttachError;
use crate::host_lease::HostLease;
use crate::lower_store::{AttachTarget, open_lower_store};
use crate::part::Part;
use crate::participants;
use crate::runtime_files::waiting_tree;
use crate::store::{LoggableStore, Store, TransactionalStore, shown_scope};

/// The opened store of a mount.
pub(crate) struct OpenedStore {
    pub(crate) store: Store,
    /// The scopes of transactions that were undone: the paths that they covered.
    pub(crate) undone_scopes: Vec<Vec<u8>>,
    /// The parts that belong to the store below transactions
    /// ([`OpenedLowerStore::parts`](crate::lower_store::OpenedLowerStore)).
    pub(crate) parts: Vec<Arc<dyn Part>>,
}

/// Opens the store, the backing with its layers, and finishes or undoes the transactions that an earlier mount has
/// left. Data of an undone transaction is dropped from the arena (shared memory) first: after a crash in between, the
/// next mount finds the transaction again.
///
/// The caller has locked the backing and the arena. `lease`, the locked file that shows that this host is alive, is
/// taken if several hosts share the backing.
pub(crate) fn open_store(
    target: &AttachTarget<'_>,
    directory: DirBacking,
    arena: &mut FoundArena,
    lease: &mut HostLease,
    notice: &mut dyn FnMut(String),
) -> Result<OpenedStore, AttachError> {
    let members = participants::members(target.options)?;
    // Transactions of other hosts or of other participants stay as they are.
    drop_data_of_foreign_transactions(target.backing, &directory, members.as_ref(), arena)?;
    let has_transactions = target.options.drain == Drain::Commit
        || TransactionalBacking::has_transactions(&directory)?;
    // Lanes and logs.
    let lower_store = open_lower_store(target, directory, lease, notice)?;
    let recovered = if has_transactions {
        open_transactional(target, lower_store.store, members, arena, notice)?
    } else {
        RecoveredStore {
            store: Store::Lower(open_plain_store(target, lower_store.store)?),
            undone_scopes: Vec::new(),
        }
    };
    Ok(OpenedStore {
        store: recovered.store,
        undone_scopes: recovered.undone_scopes,
        parts: lower_store.parts,
    })
}

/// A store with recovered transactions.
struct RecoveredStore {
    store: Store,
    /// Scopes of transactions that were undone.
    undone_scopes: Vec<Vec<u8>>,
}

/// Adds the layer of transactions to a store, and finishes or undoes the transactions that an earlier mount has left.
/// If the options ask for no transactions, the layer is removed again. That fails while a prepared transaction waits
/// for a commit or abort.
///
/// `members` are the hosts that commit together; `None` if this host commits alone.
fn open_transactional(
    target: &AttachTarget<'_>,
    lower_store: LoggableStore,
    members: Option<Members>,
    arena: &mut FoundArena,
    notice: &mut dyn FnMut(String),
) -> Result<RecoveredStore, AttachError> {
    let &AttachTarget {
        backing, options, ..
    } = target;
    let backup_dir = crate::backup::open_backup_of_mount(backing, options)?;
    let backup_store = backup_dir.as_ref().map(|backup| &backup.store);
    // The names are read first, because opening the transactions may end some of them.
    let known_backups = TransactionalBacking::known_backups(&lower_store, backup_store)?;
    let (store, outcome) = match members {
        None => open_transactions_of_this_host(target, lower_store, arena)?,
        Some(members) => open_transactions_of_members(target, lower_store, members, arena, notice)?,
    };
    let store = store.in_mode(match options.mode {
        Mode::Buffer => firn_transact::Mode::Buffer,
        Mode::Shadow => firn_transact::Mode::Shadow,
    });
    let store = crate::backup::attach_backup(store, backing, backup_dir, &known_backups)?;
    report_outcome(&outcome, notice);
    // The layer was only needed for what an earlier mount has left.
    if options.drain != Drain::Commit {
        return close_transactions(target, store, outcome);
    }
    for (id, scope) in &outcome.waiting {
        notice(format!(
            "a transaction in {} is prepared with id {id}: end it with `firn commit`, `firn abort` or `firn restore`",
            shown_scope(scope)
        ));
    }
    Ok(RecoveredStore {
        store: Store::Upper(store),
        undone_scopes: outcome.undone,
    })
}

/// Opens the layer of transactions of a host that commits alone. The transactions that it has left are finished or
/// undone, except those that continue because this firnd takes over their mount.
fn open_transactions_of_this_host(
    target: &AttachTarget<'_>,
    lower_store: LoggableStore,
    arena: &mut FoundArena,
) -> Result<(TransactionalStore, RecoveryOutcome), AttachError> {
    let opening = Opening {
        history: target.options.history,
        arena: Some(arena.id()),
        living: living_transactions(target.resumed),
        ..Opening::default()
    };
    let drop_data = |scopes: &[Vec<u8>]| drop_data_of_aborted(target, arena, scopes);
    TransactionalBacking::open_with(lower_store, opening, drop_data)
}

/// Reports to the user which transactions of an earlier firnd were finished and which were undone.
fn report_outcome(outcome: &RecoveryOutcome, notice: &mut dyn FnMut(String)) {
    for id in &outcome.finished {
        notice(format!(
            "finished the commit {id} that an earlier firnd had decided"
        ));
    }
    for scope in &outcome.undone {
        notice(format!(
            "undid a transaction in {} that was not prepared",
            shown_scope(scope)
        ));
    }
}

/// Removes the layer of transactions from a store after they have ended. Without this layer and its tables, the
/// kernel may read files itself. Fails while a prepared transaction waits.
fn close_transactions(
    target: &AttachTarget<'_>,
    store: TransactionalStore,
    outcome: RecoveryOutcome,
) -> Result<RecoveredStore, AttachError> {
    if let Some((id, scope)) = outcome.waiting.first() {
        let scope = shown_scope(scope);
        return Err(AttachError::TransactionWaits { id: *id, scope });
    }
    Ok(RecoveredStore {
        store: Store::Lower(open_plain_store(target, store.into_base())?),
        undone_scopes: outcome.undone,
    })
}

/// Returns the transactions that continue because this firnd takes over their mount.
fn living_transactions(resumed: Option<&Resumed>) -> LivingTransactions {
    let mut living = LivingTransactions::default();
    let Some(resumed) = resumed else {
        return living;
    };
    for stored in &resumed.contents.transactions {
        let transaction = stored.entry;
        living.open.insert(transaction.serial);
        if transaction.is_ending {
            living.ending.insert(transaction.serial);
        }
    }
    living
}

/// Drops the pending bytes of transactions that are aborted. The live table gets their scopes first, because a later
/// firnd would not find these transactions any more.
fn drop_data_of_aborted(
    target: &AttachTarget<'_>,
    arena: &mut FoundArena,
    scopes: &[Vec<u8>],
) -> Result<(), AttachError> {
    if let Some(resumed) = target.resumed {
        resumed.abandon_scopes(scopes, &checkpoint_keys(&target.options.rules, scopes));
    }
    arena.drop_below(scopes)
}

/// Returns the keys of those scopes that are checkpoints of a commit rule. If the rules cannot be loaded, no key is
/// returned, and the mount is refused later.
fn checkpoint_keys(rules: &[String], scopes: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let Ok(rules) = commit_rules::load(rules) else {
        return Vec::new();
    };
    scopes
        .iter()
        .filter_map(|scope| rules.checkpoint_key(scope))
        .collect()
}

/// Drops the data in this arena (the host's shared memory) that belongs to transactions which this mount cannot end.
/// They were begun with other participants, or under another host name.
///
/// Such a transaction stays as it is: only a mount with those participants and that name, or `firn recover`, ends it.
fn drop_data_of_foreign_transactions(
    backing: &Path,
    directory: &DirBacking,
    members: Option<&Members>,
    arena: &mut FoundArena,
) -> Result<(), AttachError> {
    if matches!(arena, FoundArena::Fresh(_)) {
        return Ok(());
    }
    let arena_id = arena.id();
    // An owner is a host name with its own directory of transactions in the backing, or none for a mount of one host.
    for owner in TransactionalBacking::other_staging_owners(directory, members)? {
        // `drop_of` consumes a directory, so each owner gets one of its own.
        let owned_directory =
            DirBacking::open(backing).map_err(|source| AttachError::BackingUnusable {
                path: backing.into(),
                source,
            })?;
        TransactionalBacking::drop_of(owned_directory, owner, arena_id, |scopes| {
            arena.drop_below(scopes)
        })?;
    }
    Ok(())
}

/// Returns a store without transactions. It shows `.firn` for a stub tree, even during its recovery, because a stub
/// tree keeps files without a name there. For a mount, `.firn` is hidden.
fn open_plain_store<B: Backing>(
    target: &AttachTarget<'_>,
    base: B,
) -> Result<PlainBacking<B>, AttachError> {
    let is_tree = target.options.frontend == Frontend::Preload;
    if is_tree || waiting_tree(target.files)?.is_some() {
        return Ok(PlainBacking::with_firn_dir_shown(base));
    }
    Ok(PlainBacking::new(base))
}

/// Opens the layer of transactions of a host that commits with others. The open transactions that this host has left
/// can be undone only after the other hosts have stopped their changes in them. Each attempt to open tells the other
/// hosts to stop, and is repeated for up to `participants-wait`.
fn open_transactions_of_members(
    target: &AttachTarget<'_>,
    mut lower_store: LoggableStore,
    members: Members,
    arena: &mut FoundArena,
    notice: &mut dyn FnMut(String),
) -> Result<(TransactionalStore, RecoveryOutcome), AttachError> {
    let deadline = Instant::now() + Duration::from_millis(target.options.participants_wait_ms);
    let mut backoff = participants::READ_RETRY.start();
    let mut has_reported_wait = false;
    loop {
        let opening = Opening {
            members: Some(members.clone()),
            arena: Some(arena.id()),
            living: living_transactions(target.resumed),
            ..Opening::default()
        };
        let drop_data = |scopes: &[Vec<u8>]| drop_data_of_aborted(target, arena, scopes);
        match TransactionalBacking::try_open(lower_store, opening, drop_data) {
            // Another host has not stopped its changes yet. The failed attempt has returned the store.
            Err((
                returned_store,
                AttachError::Transactions(
                    error @ TransactionError::Abort(AbortError::Stopping { .. }),
                ),
            )) if Instant::now() < deadline => {
                if !has_reported_wait {
                    notice(format!("waiting: {error}"));
                    has_reported_wait = true;
                }
                lower_store = returned_store;
            }
            opened => return opened.map_err(|(_, error)| error),
        }
        backoff.sleep();
    }
}
