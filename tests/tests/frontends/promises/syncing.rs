//! fsync(2) and `firn wait`.

use std::fs;
use std::os::unix::fs::FileExt;

use firn_tests::fsops::{assert_same_bytes, open_rw, read};
use firn_tests::mount::patient;
use firn_tests::random::bytes;
use firn_tests::{FirnMount, Sandbox};

/// Proves S-fsync-4.
#[test]
fn fsync_held_promises_what_write_does_and_the_status_says_so() {
    let sandbox = Sandbox::new("fsyncheld");
    let mount = FirnMount::new(&sandbox, &patient("close=held,fsync=held"));
    let file = open_rw(&mount.join("file"));
    file.write_all_at(&bytes(1, 70_000), 0).expect("write");
    file.sync_all().expect("fsync");
    file.sync_data().expect("fdatasync");
    let status = mount.status();
    assert_eq!((status.held_bytes, status.drain_bytes), (70_000, 0));
    assert!(
        status.options.iter().any(|option| option == "fsync=held"),
        "{:?}",
        status.options
    );
    let backing = mount.kill();
    sandbox.run(["recover".as_ref(), backing.as_os_str()]).ok();
    assert_same_bytes("recovered", &read(&backing.join("file")), &bytes(1, 70_000));
}

/// Proves S-fsync-5.
#[test]
fn wait_drains_what_is_at_or_below_its_path_and_nothing_else() {
    for level in ["drained", "durable"] {
        let sandbox = Sandbox::new(level);
        let mount = FirnMount::new(&sandbox, &patient("close=held"));
        fs::create_dir_all(mount.join("step/deep")).expect("mkdir");
        let files = ["step/one", "step/deep/two", "stepmother", "other"];
        for (index, name) in files.iter().enumerate() {
            fs::write(mount.join(name), bytes(index as u64, 1000 << index)).expect("write");
        }
        mount.wait(level, &mount.join("step")).ok();
        assert_eq!(mount.status().held_bytes, 4000 + 8000);
        for (index, name) in files[..2].iter().enumerate() {
            assert_same_bytes(
                name,
                &read(&mount.backing().join(name)),
                &bytes(index as u64, 1000 << index),
            );
        }
        mount.wait(level, &mount.join("other")).ok();
        assert_eq!(mount.status().held_bytes, 4000);
        mount.umount();
    }
}

/// Proves S-fsync-8.
#[test]
fn regression_what_was_waited_for_until_durable_is_said_to_be_durable() {
    let sandbox = Sandbox::new("saiddurable");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    fs::create_dir(mount.join("step")).expect("mkdir");
    fs::write(mount.join("step/one"), bytes(1, 1000)).expect("write");
    let changed = open_rw(&mount.join("step/two"));
    changed.write_all_at(&bytes(2, 2000), 0).expect("write");
    fs::write(mount.join("other"), bytes(3, 3000)).expect("write");
    let levels = || {
        let args = ["ls".as_ref(), "--json".as_ref(), mount.path().as_os_str()];
        let listed = sandbox.run(args).ok().json();
        let row = |file: &serde_json::Value| {
            let text = |key: &str| file[key].as_str().expect("a text").to_owned();
            (text("path"), text("level"))
        };
        let rows = listed.as_array().expect("a list").iter().map(row);
        rows.collect::<Vec<_>>()
    };
    let expected = |other: &str, one: &str, two: &str| {
        [("other", other), ("step/one", one), ("step/two", two)]
            .map(|(path, level)| (path.to_owned(), level.to_owned()))
    };

    assert_eq!(levels(), expected("held", "held", "held"));
    mount.wait("durable", &mount.join("step")).ok();
    assert_eq!(levels(), expected("held", "durable", "durable"));
    changed.write_all_at(b"changed", 10).expect("write");
    assert_eq!(levels(), expected("held", "durable", "held"));
    mount.wait("drained", mount.path()).ok();
    assert_eq!(levels(), expected("drained", "durable", "drained"));
    mount.wait("durable", mount.path()).ok();
    assert_eq!(levels(), expected("durable", "durable", "durable"));
    changed.set_len(1500).expect("truncate");
    assert_eq!(levels(), expected("durable", "durable", "drained"));
    drop(changed);
    mount.umount();
}
