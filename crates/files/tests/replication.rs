//! What a guest does to a replicated directory is on the spare after the next checkpoint.

mod common;

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use common::{Host, Pair, assert_equal, checkpoint, copy};
use hotspare_files::{ReplicatedDir, Role};
use hotspare_image::files::InodeNumber;

fn inode(path: &Path) -> InodeNumber {
    InodeNumber(fs::symlink_metadata(path).unwrap().ino())
}

#[test]
fn what_was_there_before_is_copied() {
    let pair = Pair::filled(|backing| {
        fs::create_dir_all(backing.join("a/b/c")).unwrap();
        fs::write(backing.join("a/b/file"), b"content").unwrap();
        fs::hard_link(backing.join("a/b/file"), backing.join("a/link")).unwrap();
        fs::set_permissions(backing.join("a/link"), Permissions::from_mode(0o4751)).unwrap();
        std::os::unix::fs::symlink("../away", backing.join("a/symlink")).unwrap();
        std::os::unix::fs::chown(backing.join("a"), Some(12), Some(34)).unwrap();
        nix::unistd::mkfifo(&backing.join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    });
    pair.assert_equal();
    assert_eq!(fs::metadata(pair.copy_of("a/link")).unwrap().nlink(), 2);
}

#[test]
fn what_the_spare_had_before_is_discarded() {
    let primary = Host::new(Role::Primary, |_| {});
    let spare = Host::new(Role::Spare, |backing| {
        fs::create_dir_all(backing.join("old/deep")).unwrap();
        fs::write(backing.join("old/deep/file"), b"stale").unwrap();
    });
    copy(&primary, &spare);
    checkpoint(&primary, &[&spare]);
    assert_eq!(fs::read_dir(&spare.backing).unwrap().count(), 0);
    assert_equal(&primary.mount, &spare.mount);
}

#[test]
fn a_rename_over_an_open_file_replicates() {
    let pair = Pair::new();
    fs::write(pair.path("old"), b"old content").unwrap();
    fs::write(pair.path("new"), b"new content").unwrap();
    let open = File::open(pair.path("old")).unwrap();
    let old = InodeNumber(open.metadata().unwrap().ino());
    fs::rename(pair.path("new"), pair.path("old")).unwrap();
    pair.checkpoint();
    pair.assert_equal();
    assert_eq!(fs::read(pair.copy_of("old")).unwrap(), b"new content");
    let kept = pair.spare.dir.open_inode(old, libc::O_RDONLY).unwrap();
    let mut content = Vec::new();
    File::from(kept).read_to_end(&mut content).unwrap();
    assert_eq!(content, b"old content");
}

#[test]
fn an_unlinked_open_file_goes_on_replicating_until_it_is_closed() {
    let pair = Pair::new();
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).open(pair.path("temp")).unwrap();
    file.write_all_at(b"before", 0).unwrap();
    let number = inode(&pair.path("temp"));
    fs::remove_file(pair.path("temp")).unwrap();
    file.write_all_at(b"after", 6).unwrap();
    pair.checkpoint();
    let read = |pair: &Pair| {
        let fd = pair.spare.dir.open_inode(number, libc::O_RDONLY)?;
        let mut content = Vec::new();
        File::from(fd).read_to_end(&mut content).unwrap();
        Ok::<_, nix::errno::Errno>(content)
    };
    assert_eq!(read(&pair).unwrap(), b"beforeafter");
    file.write_all_at(b"B", 0).unwrap();
    pair.checkpoint();
    assert_eq!(read(&pair).unwrap(), b"Beforeafter");
    drop(file);
    // The kernel lets go of the inode in its own time; the checkpoint after that says so.
    while read(&pair).is_ok() {
        pair.checkpoint();
    }
    assert_eq!(read(&pair).unwrap_err(), nix::errno::Errno::ESTALE);
}

#[test]
fn an_unlinked_open_file_is_part_of_the_initial_copy() {
    let primary = Host::new(Role::Primary, |_| {});
    let file = File::create_new(primary.mount.join("temp")).unwrap();
    file.write_all_at(b"kept", 0).unwrap();
    let number = inode(&primary.mount.join("temp"));
    fs::remove_file(primary.mount.join("temp")).unwrap();
    let spare = Host::new(Role::Spare, |_| {});
    copy(&primary, &spare);
    checkpoint(&primary, &[&spare]);
    let kept = spare.dir.open_inode(number, libc::O_RDONLY).unwrap();
    let mut content = Vec::new();
    File::from(kept).read_to_end(&mut content).unwrap();
    assert_eq!(content, b"kept");
}

#[test]
fn truncation_append_and_holes_replicate() {
    let pair = Pair::new();
    let file = File::create_new(pair.path("sparse")).unwrap();
    file.write_all_at(&[1; 100_000], 0).unwrap();
    file.set_len(10).unwrap();
    file.write_all_at(&[2; 5], 1 << 30).unwrap();
    let mut log = OpenOptions::new().append(true).create(true).open(pair.path("log")).unwrap();
    for line in 0..100 {
        writeln!(log, "line {line}").unwrap();
    }
    pair.checkpoint();
    for line in 100..200 {
        writeln!(log, "line {line}").unwrap();
    }
    fs::OpenOptions::new().write(true).truncate(true).open(pair.path("sparse")).unwrap();
    file.write_all_at(b"again", 3).unwrap();
    pair.checkpoint();
    pair.assert_equal();
    assert!(fs::metadata(pair.spare.backing.join("sparse")).unwrap().blocks() < 64);
}

#[test]
fn attributes_and_xattrs_replicate() {
    let pair = Pair::new();
    fs::write(pair.path("file"), b"x").unwrap();
    fs::set_permissions(pair.path("file"), Permissions::from_mode(0o6710)).unwrap();
    std::os::unix::fs::chown(pair.path("file"), Some(1000), Some(1001)).unwrap();
    let before_1970 = std::time::UNIX_EPOCH - std::time::Duration::from_millis(1500);
    let file = File::options().write(true).open(pair.path("file")).unwrap();
    file.set_modified(before_1970).unwrap();
    let meta = fs::metadata(pair.path("file")).unwrap();
    assert_eq!((meta.mtime(), meta.mtime_nsec()), (-2, 500_000_000));
    hotspare_kernel::set_xattr(&file, c"user.color", b"blue", 0).unwrap();
    hotspare_kernel::set_xattr(&file, c"user.gone", b"1", 0).unwrap();
    hotspare_kernel::remove_xattr(&file, c"user.gone").unwrap();
    pair.checkpoint();
    pair.assert_equal();
    let copy = File::open(pair.copy_of("file")).unwrap();
    assert_eq!(hotspare_kernel::get_xattr(&copy, c"user.color").unwrap(), b"blue");
    assert_eq!(hotspare_kernel::list_xattrs(&copy).unwrap(), b"user.color\0");
}

#[test]
fn exchanged_and_hard_linked_names_replicate() {
    use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
    let pair = Pair::new();
    fs::create_dir(pair.path("dir")).unwrap();
    fs::write(pair.path("dir/in"), b"in").unwrap();
    fs::write(pair.path("file"), b"file").unwrap();
    fs::hard_link(pair.path("file"), pair.path("dir/link")).unwrap();
    pair.checkpoint();
    let (dir, file) = (pair.path("dir"), pair.path("file"));
    renameat2(AT_FDCWD, &dir, AT_FDCWD, &file, RenameFlags::RENAME_EXCHANGE).unwrap();
    let refused = renameat2(AT_FDCWD, &dir, AT_FDCWD, &file, RenameFlags::RENAME_NOREPLACE);
    assert_eq!(refused, Err(nix::errno::Errno::EEXIST));
    pair.checkpoint();
    pair.assert_equal();
    assert_eq!(fs::read(pair.copy_of("file/in")).unwrap(), b"in");
}

#[test]
fn the_kernel_on_the_spare_sees_each_checkpoint_at_once() {
    let pair = Pair::new();
    assert!(fs::metadata(pair.copy_of("late")).is_err());
    fs::write(pair.path("late"), b"one").unwrap();
    pair.checkpoint();
    let mut copy = File::open(pair.copy_of("late")).unwrap();
    let mut content = String::new();
    copy.read_to_string(&mut content).unwrap();
    assert_eq!(content, "one");
    fs::write(pair.path("late"), b"three").unwrap();
    pair.checkpoint();
    // The ghost's end of the file is known without a stat: an append lands there.
    copy.seek(SeekFrom::Start(0)).unwrap();
    content.clear();
    copy.read_to_string(&mut content).unwrap();
    assert_eq!(content, "three");
    fs::remove_file(pair.path("late")).unwrap();
    pair.checkpoint();
    assert!(fs::metadata(pair.copy_of("late")).is_err());
}

#[test]
fn an_append_after_the_failover_lands_at_the_replicated_end() {
    let pair = Pair::new();
    fs::write(pair.path("log"), b"one\n").unwrap();
    pair.checkpoint();
    let mut options = OpenOptions::new();
    let mut ghost = options.append(true).open(pair.copy_of("log")).unwrap();
    let mut guest = OpenOptions::new().append(true).open(pair.path("log")).unwrap();
    guest.write_all(b"two\n").unwrap();
    pair.checkpoint();
    pair.spare.dir.promote().unwrap();
    ghost.write_all(b"three\n").unwrap();
    assert_eq!(fs::read(pair.copy_of("log")).unwrap(), b"one\ntwo\nthree\n");
    assert_eq!(fs::read(pair.spare.backing.join("log")).unwrap(), b"one\ntwo\nthree\n");
}

#[test]
fn a_spare_is_read_only_until_it_is_promoted_and_then_takes_a_spare_itself() {
    let pair = Pair::new();
    fs::write(pair.path("a"), b"a").unwrap();
    pair.checkpoint();
    let refused = fs::write(pair.copy_of("b"), b"b").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    pair.spare.dir.promote().unwrap();
    fs::write(pair.copy_of("b"), b"b").unwrap();
    let third = Host::new(Role::Spare, |_| {});
    copy(&pair.spare, &third);
    fs::rename(pair.copy_of("a"), pair.copy_of("c")).unwrap();
    checkpoint(&pair.spare, &[&third]);
    assert_equal(&pair.spare.mount, &third.mount);
}

#[test]
fn a_second_spare_joins_between_the_checkpoints_of_the_first() {
    let pair = Pair::new();
    let late = Host::new(Role::Spare, |_| {});
    fs::write(pair.path("before"), b"1").unwrap();
    let mut chunks = pair.primary.dir.initial_copy().chunks(1);
    late.dir.copy_chunk(&chunks.next().unwrap().unwrap()).unwrap();
    fs::rename(pair.path("before"), pair.path("after")).unwrap();
    fs::write(pair.path("before"), b"2").unwrap();
    checkpoint(&pair.primary, &[&pair.spare, &late]);
    assert!(!late.dir.is_complete() && late.dir.promote().is_err());
    fs::remove_file(pair.path("before")).unwrap();
    for chunk in chunks {
        late.dir.copy_chunk(&chunk.unwrap()).unwrap();
    }
    assert!(late.dir.is_complete());
    checkpoint(&pair.primary, &[&pair.spare, &late]);
    pair.assert_equal();
    assert_equal(&pair.primary.mount, &late.mount);
}

#[test]
fn a_user_without_privilege_is_held_to_the_modes_and_loses_setuid_by_writing() {
    let pair = Pair::new();
    fs::set_permissions(&pair.primary.mount, Permissions::from_mode(0o777)).unwrap();
    fs::set_permissions(pair.primary.backing.parent().unwrap(), Permissions::from_mode(0o755))
        .unwrap();
    fs::write(pair.path("closed"), b"x").unwrap();
    fs::write(pair.path("open"), b"x").unwrap();
    fs::set_permissions(pair.path("closed"), Permissions::from_mode(0o600)).unwrap();
    fs::set_permissions(pair.path("open"), Permissions::from_mode(0o4777)).unwrap();
    let script = "cat closed; echo more >> open; echo own > own";
    std::process::Command::new("setpriv")
        .args(["--reuid=4321", "--regid=4321", "--clear-groups", "sh", "-c", script])
        .current_dir(&pair.primary.mount)
        .status()
        .unwrap();
    pair.checkpoint();
    pair.assert_equal();
    assert_eq!(fs::metadata(pair.copy_of("open")).unwrap().mode() & 0o7777, 0o777);
    assert_eq!(fs::metadata(pair.copy_of("own")).unwrap().uid(), 4321);
    assert_eq!(fs::read(pair.copy_of("open")).unwrap(), b"xmore\n");
}

#[test]
fn a_position_in_a_listing_is_the_same_on_both_hosts() {
    let pair = Pair::new();
    for number in 0..500 {
        fs::write(pair.path(&format!("file{number}")), b"").unwrap();
    }
    pair.checkpoint();
    let names = |path: &Path| {
        let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
        entries.collect::<Vec<_>>()
    };
    assert_eq!(names(&pair.primary.mount).len(), 500);
    assert_eq!(names(&pair.primary.mount), names(&pair.spare.mount));
}

#[test]
fn what_cannot_be_replicated_is_refused_with_its_path() {
    let temporary = tempfile::tempdir().unwrap();
    let (backing, mount) = (temporary.path().join("b"), temporary.path().join("m"));
    fs::create_dir_all(&backing).unwrap();
    fs::create_dir_all(&mount).unwrap();
    let device = nix::sys::stat::makedev(1, 3);
    let kind = nix::sys::stat::SFlag::S_IFCHR;
    let made =
        nix::sys::stat::mknod(&backing.join("null"), kind, nix::sys::stat::Mode::S_IRWXU, device);
    made.unwrap();
    let refused = ReplicatedDir::serve(&backing, &mount, Role::Primary).unwrap_err().to_string();
    assert!(refused.contains("b/null") && refused.contains("character device"), "{refused}");
    let refused = ReplicatedDir::serve(Path::new("/"), &mount, Role::Spare).unwrap_err();
    assert!(refused.to_string().contains("root directory"), "{refused}");
}

#[test]
fn a_full_disk_on_the_spare_is_an_error_with_the_path_and_the_copy_is_unusable() {
    let temporary = tempfile::tempdir().unwrap();
    let (disk, mount) = (temporary.path().join("disk"), temporary.path().join("mount"));
    fs::create_dir_all(&disk).unwrap();
    fs::create_dir_all(&mount).unwrap();
    let flags = nix::mount::MsFlags::empty();
    nix::mount::mount(Some("tmpfs"), &disk, Some("tmpfs"), flags, Some("size=1m")).unwrap();
    let spare = ReplicatedDir::serve(&disk, &mount, Role::Spare).unwrap();
    let primary = Host::new(Role::Primary, |_| {});
    for chunk in primary.dir.initial_copy().chunks(64 << 10) {
        spare.copy_chunk(&chunk.unwrap()).unwrap();
    }
    fs::write(primary.mount.join("big"), vec![7; 3 << 20]).unwrap();
    let set = primary.dir.cut().unwrap();
    let error = spare.apply(&set).unwrap_err().to_string();
    assert!(error.contains("disk/big") && error.contains("free space"), "{error}");
    assert!(!spare.is_complete());
    assert!(spare.apply(&primary.dir.cut().unwrap()).unwrap_err().to_string().contains("disk"));
    assert!(spare.promote().is_err());
    drop(spare);
    nix::mount::umount2(&disk, nix::mount::MntFlags::MNT_DETACH).unwrap();
}

#[test]
fn a_full_disk_on_the_primary_is_the_guests_error() {
    let temporary = tempfile::tempdir().unwrap();
    let (disk, mount) = (temporary.path().join("disk"), temporary.path().join("mount"));
    fs::create_dir_all(&disk).unwrap();
    fs::create_dir_all(&mount).unwrap();
    let flags = nix::mount::MsFlags::empty();
    nix::mount::mount(Some("tmpfs"), &disk, Some("tmpfs"), flags, Some("size=1m")).unwrap();
    let primary = ReplicatedDir::serve(&disk, &mount, Role::Primary).unwrap();
    let error = fs::write(mount.join("big"), vec![7; 3 << 20]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    drop(primary);
    nix::mount::umount2(&disk, nix::mount::MntFlags::MNT_DETACH).unwrap();
}

#[test]
fn locks_are_kept_by_the_kernel() {
    let pair = Pair::new();
    let first = File::create_new(pair.path("lock")).unwrap();
    let second = File::open(pair.path("lock")).unwrap();
    first.lock().unwrap();
    assert!(second.try_lock().is_err());
    first.unlock().unwrap();
    second.try_lock().unwrap();
}

#[test]
fn a_file_is_opened_by_inode_with_the_flags_asked_for() {
    let pair = Pair::new();
    fs::write(pair.path("f"), b"12345").unwrap();
    pair.checkpoint();
    let number = inode(&pair.path("f"));
    assert_eq!(pair.spare.dir.path_of(number).unwrap(), Path::new("f"));
    let fd = pair.spare.dir.open_inode(number, libc::O_RDWR | libc::O_APPEND).unwrap();
    let flags = nix::fcntl::fcntl(fd.as_fd(), nix::fcntl::FcntlArg::F_GETFL).unwrap();
    assert_eq!(flags & (libc::O_ACCMODE | libc::O_APPEND), libc::O_RDWR | libc::O_APPEND);
    let through_proc = fs::metadata(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
    assert_eq!((through_proc.ino(), through_proc.dev()), (number.0, pair.spare.dir.device()));
}

#[test]
fn synchronous_writes_and_fsync_work() {
    let pair = Pair::new();
    let mut options = OpenOptions::new();
    options.write(true).create(true).custom_flags(libc::O_SYNC);
    let mut file = options.open(pair.path("f")).unwrap();
    file.write_all(b"synced").unwrap();
    file.sync_all().unwrap();
    File::open(&pair.primary.mount).unwrap().sync_all().unwrap();
    pair.checkpoint();
    pair.assert_equal();
}
