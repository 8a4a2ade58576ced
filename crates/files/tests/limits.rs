//! Bounded memory, and what happens at the edges of a directory's life.

mod common;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use common::{Host, Pair, assert_equal, checkpoint, copy};
use hotspare_files::{LogLimits, ReplicatedDir, Role};
use hotspare_image::files::InodeNumber;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

#[test]
fn a_writer_without_checkpoints_asks_for_one_goes_on_slowly_and_loses_nothing() {
    let limits = LogLimits { soft_bytes: 1 << 20, hard_bytes: 2 << 20 };
    let primary = Host::with_limits(Role::Primary, limits, |_| {});
    let spare = Host::new(Role::Spare, |_| {});
    copy(&primary, &spare);
    let asked = Arc::new(AtomicU32::new(0));
    let counter = asked.clone();
    primary.dir.on_cut_wanted(move || {
        counter.fetch_add(1, Ordering::AcqRel);
    });
    let mut file = File::create_new(primary.mount.join("big")).unwrap();
    for block in 0..64u8 {
        file.write_all(&[block; 128 << 10]).unwrap();
    }
    assert_eq!(asked.load(Ordering::Acquire), 1);
    checkpoint(&primary, &[&spare]);
    assert_equal(&primary.mount, &spare.mount);
    for block in 0..64u8 {
        file.write_all(&[block; 128 << 10]).unwrap();
    }
    assert_eq!(asked.load(Ordering::Acquire), 2);
    checkpoint(&primary, &[&spare]);
    assert_equal(&primary.mount, &spare.mount);
}

#[test]
fn pages_written_again_and_again_are_sent_once() {
    let pair = Pair::new();
    let mut file = File::create_new(pair.path("page")).unwrap();
    for round in 0..1000u32 {
        std::os::unix::fs::FileExt::write_all_at(&file, &[round as u8; 4096], 8192).unwrap();
    }
    file.flush().unwrap();
    let set = pair.primary.dir.cut().unwrap();
    assert_eq!(set.content_bytes(), 4096);
}

#[test]
fn nothing_is_kept_without_a_spare() {
    let primary = Host::new(Role::Primary, |_| {});
    fs::write(primary.mount.join("f"), b"x").unwrap();
    assert!(primary.dir.cut().unwrap().is_empty());
    drop(primary.dir.initial_copy());
    fs::write(primary.mount.join("f"), b"y").unwrap();
    assert!(!primary.dir.cut().unwrap().is_empty());
    primary.dir.stop_recording();
    fs::write(primary.mount.join("f"), b"z").unwrap();
    assert!(primary.dir.cut().unwrap().is_empty());
}

#[test]
fn a_mount_that_was_moved_goes_on_when_its_first_place_is_unmounted() {
    let temporary = tempfile::tempdir().unwrap();
    let (backing, first) = (temporary.path().join("backing"), temporary.path().join("first"));
    fs::create_dir(&backing).unwrap();
    fs::create_dir(&first).unwrap();
    fs::write(backing.join("f"), b"x").unwrap();
    let dir = ReplicatedDir::serve(&backing, &first, Role::Primary).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let none = None::<&str>;
    mount(Some(&first), elsewhere.path(), none, MsFlags::MS_BIND, none).unwrap();
    umount2(&first, MntFlags::MNT_DETACH).unwrap();
    assert!(!first.join("f").exists());
    fs::write(elsewhere.path().join("f"), b"y").unwrap();
    drop(dir);
    assert_eq!(fs::read(elsewhere.path().join("f")).unwrap(), b"y");
    umount2(elsewhere.path(), MntFlags::MNT_DETACH).unwrap();
}

#[test]
fn a_directory_is_served_over_itself() {
    let temporary = tempfile::tempdir().unwrap();
    fs::write(temporary.path().join("f"), b"under").unwrap();
    let dir = ReplicatedDir::serve(temporary.path(), temporary.path(), Role::Primary).unwrap();
    let meta = fs::metadata(temporary.path().join("f")).unwrap();
    assert_eq!(meta.dev(), dir.device());
    fs::write(temporary.path().join("f"), b"through").unwrap();
    dir.unmount();
    assert_eq!(fs::read(temporary.path().join("f")).unwrap(), b"through");
}

#[test]
fn unlinked_files_survive_the_failover_exactly_if_the_guest_has_them_open() {
    let pair = Pair::new();
    let mut open = Vec::new();
    for name in ["kept", "dropped"] {
        let mut file = File::create_new(pair.path(name)).unwrap();
        file.write_all(name.as_bytes()).unwrap();
        open.push(file);
        fs::remove_file(pair.path(name)).unwrap();
    }
    let inodes: Vec<InodeNumber> =
        open.iter().map(|file| InodeNumber(file.metadata().unwrap().ino())).collect();
    pair.checkpoint();
    pair.spare.dir.promote().unwrap();
    let mut ghost = File::from(pair.spare.dir.open_inode(inodes[0], libc::O_RDWR).unwrap());
    pair.spare.dir.discard_unopened();
    let gone = pair.spare.dir.open_inode(inodes[1], libc::O_RDWR).unwrap_err();
    assert_eq!(gone, nix::errno::Errno::ESTALE);
    let mut content = String::new();
    ghost.read_to_string(&mut content).unwrap();
    ghost.write_all(b" and written").unwrap();
    assert_eq!((content.as_str(), ghost.metadata().unwrap().nlink()), ("kept", 0));
    let third = Host::new(Role::Spare, |_| {});
    copy(&pair.spare, &third);
    checkpoint(&pair.spare, &[&third]);
    let mut content = String::new();
    let copied = third.dir.open_inode(inodes[0], libc::O_RDONLY).unwrap();
    File::from(copied).read_to_string(&mut content).unwrap();
    assert_eq!(content, "kept and written");
}

#[test]
fn changes_that_no_primary_sends_are_refused_and_touch_nothing_outside() {
    use hotspare_image::files::{FileChange, encode_changes};
    let spare = Host::new(Role::Spare, |_| {});
    let write = FileChange::Write { inode: InodeNumber(9), offset: 0, bytes: vec![1] };
    let error = spare.dir.copy_chunk(&encode_changes(std::slice::from_ref(&write))).unwrap_err();
    assert!(error.to_string().contains("make no sense"), "{error}");
    let error = spare.dir.copy_chunk(b"\xff\x00garbage").unwrap_err();
    assert!(error.to_string().contains("make no sense"), "{error}");
    let pair = Pair::filled(|backing| {
        fs::create_dir(backing.join("d")).unwrap();
        fs::write(backing.join("d/stays"), b"one").unwrap();
        fs::write(backing.join("d/goes"), b"two").unwrap();
    });
    pair.assert_equal();
    let known = File::open(pair.copy_of("d/stays")).unwrap();
    let mut set = pair.spare.dir.staging();
    set.push_chunk(&encode_changes(&[write])).unwrap();
    assert!(pair.spare.dir.apply(&set).is_err());
    assert!(!pair.spare.dir.is_complete());
    // A new initial copy makes it usable again, whatever the kernel remembers of the old one.
    fs::rename(pair.path("d/goes"), pair.path("came")).unwrap();
    fs::write(pair.path("d/stays"), b"three").unwrap();
    copy(&pair.primary, &pair.spare);
    pair.checkpoint();
    assert!(pair.spare.dir.is_complete());
    pair.assert_equal();
    assert_eq!(known.metadata().unwrap().len(), 5);
}

#[test]
fn paths_longer_than_the_kernel_takes_at_once_replicate() {
    use nix::fcntl::{OFlag, openat};
    use nix::sys::stat::{Mode, mkdirat};
    let pair = Pair::new();
    let name = "n".repeat(250);
    let mut at = std::os::fd::OwnedFd::from(File::open(&pair.primary.mount).unwrap());
    for _ in 0..40 {
        mkdirat(&at, name.as_str(), Mode::S_IRWXU).unwrap();
        at = openat(&at, name.as_str(), OFlag::O_DIRECTORY, Mode::empty()).unwrap();
    }
    let flags = OFlag::O_CREAT | OFlag::O_RDWR;
    let file = openat(&at, "file", flags, Mode::S_IRWXU).unwrap();
    nix::unistd::write(&file, b"deep").unwrap();
    let inode = InodeNumber(nix::sys::stat::fstat(&file).unwrap().st_ino);
    pair.checkpoint();
    let third = Host::new(Role::Spare, |_| {});
    copy(&pair.primary, &third);
    checkpoint(&pair.primary, &[&pair.spare, &third]);
    for spare in [&pair.spare, &third] {
        let mut content = String::new();
        let copied = spare.dir.open_inode(inode, libc::O_RDONLY).unwrap();
        File::from(copied).read_to_string(&mut content).unwrap();
        assert_eq!(content, "deep");
    }
    copy(&pair.primary, &third);
}
