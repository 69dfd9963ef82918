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
