//! Opens the store of a mount: its ground, and the layer of transactions above it.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::{Backing, DirBacking};
use firn_config::{Drain, Frontend, Mode};
use firn_engine::Resumed;
use firn_transact::{
    AbortError, LivingTransactions, Members, Opening, PlainBacking, TransactionError,
    TransactionalBacking,
};

use crate::commit_rules;
use crate::error::AttachError;
use crate::found_arena::Found;
use crate::ground::{Target, open_ground};
use crate::host_lease::HostLease;
use crate::part::Part;
use crate::participants;
use crate::runtime_files::waiting_tree;
use crate::store::{LoggableStore, Store, TransactionalStore, shown_scope};

/// The opened store of a mount.
pub(crate) struct OpenedStore {
    pub(crate) store: Store,
    /// Scopes of transactions that were undone.
    pub(crate) undone: Vec<Vec<u8>>,
    /// The parts that belong to its ground ([`OpenedGround::parts`](crate::ground::OpenedGround)).
    pub(crate) parts: Vec<Arc<dyn Part>>,
}

/// Opens the store, and finishes or undoes the transactions of an earlier firnd. Pending data of an undone transaction
/// is dropped from the arena first: after a crash in between, the next firnd finds the transaction again.
pub(crate) fn open_store(
    target: &Target<'_>,
    directory: DirBacking,
    arena: &mut Found,
    lease: &mut HostLease,
    notice: &mut dyn FnMut(String),
) -> Result<OpenedStore, AttachError> {
    let members = participants::members(target.options)?;
    drop_of_other_homes(target.backing, &directory, members.as_ref(), arena)?;
    let has_transactions = target.options.drain == Drain::Commit
        || TransactionalBacking::has_transactions(&directory)?;
    let ground = open_ground(target, directory, lease, notice)?;
    let Recovered { store, undone } = if has_transactions {
        open_transactional(target, ground.store, members, arena, notice)?
    } else {
        Recovered {
            store: Store::Lower(plain(target, ground.store)?),
            undone: Vec::new(),
        }
    };
    Ok(OpenedStore {
        store,
        undone,
        parts: ground.parts,
    })
}

/// A store whose transactions were recovered.
struct Recovered {
    store: Store,
    /// Scopes of transactions that were undone.
    undone: Vec<Vec<u8>>,
}

/// Opens the layer of transactions, and finishes or undoes those of an earlier firnd. If the options ask for no
/// transactions, the layer is removed again; this fails while a prepared transaction waits.
fn open_transactional(
    target: &Target<'_>,
    ground: LoggableStore,
    members: Option<Members>,
    arena: &mut Found,
    notice: &mut dyn FnMut(String),
) -> Result<Recovered, AttachError> {
    let &Target {
        backing, options, ..
    } = target;
    let backups = crate::backup::open_backups(backing, options)?;
    let known =
        TransactionalBacking::known_backups(&ground, backups.as_ref().map(|backup| &backup.store))?;
    let (store, outcome) = match members {
        None => {
            let opening = Opening {
                history: options.history,
                arena: Some(arena.id()),
                living: living_transactions(target.resumed),
                ..Opening::default()
            };
            let drop_pending = |scopes: &[Vec<u8>]| drop_uncommitted(target, arena, scopes);
            TransactionalBacking::open_with(ground, opening, drop_pending)?
        }
        Some(members) => open_of_members(target, ground, members, arena, notice)?,
    };
    let store = store.in_mode(match options.mode {
        Mode::Buffer => firn_transact::Mode::Buffer,
        Mode::Shadow => firn_transact::Mode::Shadow,
    });
    let store = crate::backup::attach(store, backing, backups, &known)?;
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
    if options.drain != Drain::Commit {
        // Without the layer of transactions and its tables, the kernel may read files itself.
        let Some((id, scope)) = outcome.waiting.first() else {
            return Ok(Recovered {
                store: Store::Lower(plain(target, store.into_base())?),
                undone: outcome.undone,
            });
        };
        let scope = shown_scope(scope);
        return Err(AttachError::TransactionWaits { id: *id, scope });
    }
    for (id, scope) in &outcome.waiting {
        notice(format!(
            "a transaction in {} is prepared with id {id} and waits: firn commit or firn abort ends it, firn restore finishes it",
            shown_scope(scope)
        ));
    }
    Ok(Recovered {
        store: Store::Upper(store),
        undone: outcome.undone,
    })
}

/// Returns the transactions that continue because this firnd takes over their mount.
fn living_transactions(resumed: Option<&Resumed>) -> LivingTransactions {
    let mut living = LivingTransactions::default();
    for stored in resumed
        .iter()
        .flat_map(|resumed| &resumed.contents.transactions)
    {
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
fn drop_uncommitted(
    target: &Target<'_>,
    arena: &mut Found,
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
    let keys = scopes
        .iter()
        .filter_map(|scope| rules.checkpoint_key(scope));
    keys.collect()
}

/// Drops the data in this arena that belongs to transactions of other participants or of another host name. Only a
/// mount with the same participants and host name, or `firn recover`, ends such a transaction. This mount leaves the
/// transaction as it is.
fn drop_of_other_homes(
    backing: &Path,
    directory: &DirBacking,
    members: Option<&Members>,
    arena: &mut Found,
) -> Result<(), AttachError> {
    if matches!(arena, Found::Fresh(_)) {
        return Ok(());
    }
    let id = arena.id();
    for home in TransactionalBacking::other_staging_owners(directory, members)? {
        let directory = DirBacking::open(backing).map_err(|e| AttachError::BackingUnusable {
            path: backing.into(),
            source: e,
        })?;
        TransactionalBacking::drop_of(directory, home, id, |scopes| arena.drop_below(scopes))?;
    }
    Ok(())
}

/// Returns a store without transactions. It shows `.firn` for a stub tree, even during its recovery, because a stub
/// tree keeps files without a name there. For a mount, `.firn` is hidden.
fn plain<B: Backing>(target: &Target<'_>, base: B) -> Result<PlainBacking<B>, AttachError> {
    let is_tree = target.options.frontend == Frontend::Preload;
    if is_tree || waiting_tree(target.files)?.is_some() {
        return Ok(PlainBacking::with_firn_dir_shown(base));
    }
    Ok(PlainBacking::new(base))
}

/// Opens the transactions of a host that commits with others, and waits up to `participants-wait` until they have
/// stopped. Only then can the open transactions of this host be undone. The attempt to open informs the other hosts
/// that they must stop.
fn open_of_members(
    target: &Target<'_>,
    mut ground: LoggableStore,
    members: Members,
    arena: &mut Found,
    notice: &mut dyn FnMut(String),
) -> Result<(TransactionalStore, firn_transact::RecoveryOutcome), AttachError> {
    let deadline = Instant::now() + Duration::from_millis(target.options.participants_wait_ms);
    let mut waits = participants::LOOK_AGAIN.start();
    let mut is_reported = false;
    loop {
        let opening = Opening {
            members: Some(members.clone()),
            arena: Some(arena.id()),
            living: living_transactions(target.resumed),
            ..Opening::default()
        };
        let drop_pending = |scopes: &[Vec<u8>]| drop_uncommitted(target, arena, scopes);
        match TransactionalBacking::try_open(ground, opening, drop_pending) {
            Err((
                base,
                AttachError::Transactions(
                    error @ TransactionError::Abort(AbortError::Stopping { .. }),
                ),
            )) if Instant::now() < deadline => {
                if !std::mem::replace(&mut is_reported, true) {
                    notice(format!("waiting: {error}"));
                }
                ground = base;
            }
            opened => return opened.map_err(|(_, error)| error),
        }
        waits.sleep();
    }
}
