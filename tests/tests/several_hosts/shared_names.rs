//! Names that one host gives and another one opens: two firnd, each on a host of its own, over one shared backing, with
//! the options that users have. What an open finds by a name is what another host's close left there.
//!
//! Needs root and FUSE.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::Path;

use firn_tests::{FirnMount, Sandbox};

const OPTIONS: &str = "arena-size=64M,chunk-size=4M";
/// Each is tried this often: what the kernel has cached of a name is old in some of them.
const ROUNDS: usize = 5;

/// Runs a test with two mounts of one backing, for each way in which hosts are known to share one.
fn on_two_hosts(name: &str, test: impl Fn(&FirnMount<'_>, &FirnMount<'_>)) {
    for (way, more) in [
        ("behind", "layout=log"),
        ("close", "layout=log,flatten=close"),
        ("demand", "layout=log,flatten=demand"),
        ("tokens", "tokens=flock"),
    ] {
        let name = format!("{name}-{way}");
        let shared = Sandbox::new(&name);
        let hosts = ["n0", "n1"].map(|host| Sandbox::on_host(&format!("{name}-{host}"), host));
        let options = format!("{OPTIONS},{more}");
        let mount = |host| FirnMount::over(host, &shared.join("backing"), &options);
        let mounts = [mount(&hosts[0]), mount(&hosts[1])];
        test(&mounts[0], &mounts[1]);
        mounts.into_iter().for_each(|mount| drop(mount.umount()));
    }
}

fn make(path: &Path, text: &str) {
    let mut file = File::create_new(path).expect("create");
    file.write_all(text.as_bytes()).expect("write");
}

#[track_caller]
fn assert_has(path: &Path, text: &str) {
    let found = fs::read_to_string(path).map_err(|error| error.kind());
    assert_eq!(found.as_deref(), Ok(text), "{}", path.display());
}

#[track_caller]
fn assert_missing(path: &Path) {
    let found = File::open(path).map(drop).map_err(|error| error.kind());
    assert_eq!(found, Err(ErrorKind::NotFound), "{}", path.display());
}

/// Proves S-share-5: of a file that is removed and made again, and of one that another is renamed over.
#[test]
fn a_name_leads_to_the_file_that_another_host_put_there() {
    on_two_hosts("names", |here, there| {
        for round in 0..ROUNDS {
            let name = format!("file{round}");
            let (mine, theirs) = (here.join(&name), there.join(&name));
            assert_missing(&theirs);
            make(&mine, "old");
            assert_has(&theirs, "old");
            fs::remove_file(&mine).expect("remove");
            make(&mine, "made anew");
            assert_has(&theirs, "made anew");
            make(&here.join("next"), "renamed over it");
            fs::rename(here.join("next"), &mine).expect("rename");
            assert_has(&theirs, "renamed over it");
            let len = fs::metadata(&theirs).expect("stat").len();
            assert_eq!(len, "renamed over it".len() as u64);
            // And back.
            fs::remove_file(&theirs).expect("remove");
            make(&theirs, "of the other host");
            assert_has(&mine, "of the other host");
            fs::remove_file(&theirs).expect("remove");
            assert_missing(&mine);
        }
    });
}

/// Proves S-share-5: the names of directories on the way count as well.
#[test]
fn a_directory_that_another_host_replaced_is_the_new_one() {
    on_two_hosts("directories", |here, there| {
        let (latest, next) = (here.join("latest"), here.join("next"));
        let found = there.join("latest/file");
        fs::create_dir(&latest).expect("mkdir");
        make(&latest.join("file"), "0");
        assert_has(&found, "0");
        for round in 1..=ROUNDS {
            let text = round.to_string();
            fs::create_dir(&next).expect("mkdir");
            make(&next.join("file"), &text);
            fs::rename(&latest, here.join(format!("old{round}"))).expect("rename");
            assert_missing(&found);
            fs::rename(&next, &latest).expect("rename");
            assert_has(&found, &text);
        }
    });
}

/// Proves S-share-5: of two hosts that make one name, one makes it; and a file that another host has put into a log is
/// whole when it is opened by its name.
#[test]
fn a_name_that_another_host_made_is_there() {
    on_two_hosts("made", |here, there| {
        for round in 0..ROUNDS {
            let name = format!("file{round}");
            assert_missing(&there.join(&name));
            make(&here.join(&name), "first");
            let again = File::create_new(there.join(&name)).map(drop);
            let kind = again.expect_err("it is there").kind();
            assert_eq!(kind, ErrorKind::AlreadyExists);
            let mut file = File::options()
                .append(true)
                .open(there.join(&name))
                .expect("open");
            file.write_all(b", second").expect("append");
            drop(file);
            assert_has(&here.join(&name), "first, second");
        }
    });
}
