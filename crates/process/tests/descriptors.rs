//! Descriptors of a guest are captured, made anew, and behave as before.

mod common;

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use common::{Capturing, Ghost, Guest, Opened, Parts, capture, detail, flags, move_over, object};
use hotspare_image::objects::{LockKind, Object};
use hotspare_image::tree::GuestPid;
use hotspare_kernel::{HostPid, descriptor, epoll};
use hotspare_process::objects::remote_step::RemoteStep;
use nix::fcntl::{Flock, FlockArg};

/// Not a test of its own: the guest of the others.
#[test]
fn guest_side() {
    common::play(&[
        ("files", open_files),
        ("undeclared", open_undeclared),
        ("deleted", open_deleted),
        ("locks", open_locks),
        ("pipes", open_pipes),
        ("full pipe", open_full_pipe),
        ("packets", open_packets),
        ("fifo", open_fifo),
        ("eventfds", open_eventfds),
        ("timers", open_timers),
        ("signalfd", open_signalfd),
        ("inotify", open_inotify),
        ("inotify unread", open_inotify_unread),
        ("pidfds", open_pidfds),
        ("memfd", open_memfd),
        ("devices", open_devices),
        ("terminal", open_terminal),
        ("namespace", open_namespace),
        ("epoll", open_epoll),
        ("epoll signalfd", open_epoll_signalfd),
        ("many", open_many),
        ("renamed", open_renamed),
        ("in flight", open_in_flight),
        ("owner", open_owner),
        ("obstacles", open_obstacles),
        ("family", open_family),
        ("loner", open_loner),
        ("queue", open_queue),
    ]);
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn write(mut file: impl Write, bytes: &[u8]) {
    file.write_all(bytes).unwrap();
}

fn open_files(directory: &Path, _: u32, opened: &mut Opened) {
    std::fs::write(directory.join("file"), b"0123456789").unwrap();
    let mut options = OpenOptions::new();
    options.read(true).append(true);
    let mut file = options.open(directory.join("file")).unwrap();
    file.seek(std::io::SeekFrom::Start(4)).unwrap();
    let twin = file.try_clone().unwrap();
    let mut other = options.open(directory.join("file")).unwrap();
    other.seek(std::io::SeekFrom::Start(4)).unwrap();
    let only_path = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(directory);
    opened.push(("file", file.into()));
    opened.push(("twin", twin.into()));
    opened.push(("other", other.into()));
    opened.push(("path", only_path.unwrap().into()));
    opened.push(("directory", File::open(directory).unwrap().into()));
    opened.push(("proc", File::open("/proc/self/stat").unwrap().into()));
}

#[test]
fn files_keep_offset_and_flags_and_share_what_they_shared() {
    let directory = scratch();
    let guest = Guest::start("files", directory.path());
    let (image, ghost) = move_over(guest);
    let mut file = File::from(ghost.fd("file").try_clone().unwrap());
    assert_eq!(flags(ghost.fd("file")), (libc::O_RDWR | libc::O_APPEND) as u32);
    assert_eq!(file.stream_position().unwrap(), 4);
    let mut two = [0; 2];
    file.read_exact(&mut two).unwrap();
    assert_eq!(&two, b"45");
    let mut twin = File::from(ghost.fd("twin").try_clone().unwrap());
    assert_eq!(twin.stream_position().unwrap(), 6);
    let mut other = File::from(ghost.fd("other").try_clone().unwrap());
    assert_eq!(other.stream_position().unwrap(), 4);
    assert_eq!(flags(ghost.fd("path")) & libc::O_PATH as u32, libc::O_PATH as u32);
    let regular = image.files.iter().filter(|file| matches!(file.object, Object::Regular(_)));
    assert_eq!(regular.count(), 2, "two descriptions on one file");
}

#[test]
fn descriptions_keep_their_names_from_epoch_to_epoch() {
    let directory = scratch();
    let guest = Guest::start("files", directory.path());
    let mut capturing = Capturing::of(&guest);
    let first = capturing.capture(&[guest.process()]).unwrap();
    let second = capturing.capture(&[guest.process()]).unwrap();
    assert_eq!(first.tables, second.tables);
    assert_eq!(first.files, second.files);
}

fn open_undeclared(_: &Path, _: u32, opened: &mut Opened) {
    let path = format!("/tmp/hotspare-undeclared-{}", std::process::id());
    opened.push(("file", File::create(&path).unwrap().into()));
    std::fs::rename(&path, "/tmp/hotspare-undeclared").unwrap();
}

#[test]
fn writing_outside_of_declared_directories_is_refused_with_a_way_out() {
    let directory = scratch();
    let guest = Guest::start("undeclared", directory.path());
    let error = capture(&guest).map(drop).unwrap_err().to_string();
    assert!(error.contains("/tmp/hotspare-undeclared"), "{error}");
    assert!(error.contains("--files replicate:DIR"), "{error}");
    assert!(error.contains(&format!("descriptor {}", guest.fds["file"])), "{error}");
    std::fs::remove_file("/tmp/hotspare-undeclared").unwrap();
}

fn open_deleted(directory: &Path, _: u32, opened: &mut Opened) {
    opened.push(("file", File::create(directory.join("gone")).unwrap().into()));
    std::fs::remove_file(directory.join("gone")).unwrap();
    let odd = directory.join("odd (deleted)");
    opened.push(("odd", File::create(odd).unwrap().into()));
}

#[test]
fn a_deleted_file_is_known_by_its_inode_and_a_name_may_look_deleted() {
    let directory = scratch();
    let guest = Guest::start("deleted", directory.path());
    let image = capture(&guest).unwrap();
    let inode = descriptor::stat(guest.take("file").as_fd()).unwrap().inode;
    let Object::Regular(gone) = object(&image, guest.fds["file"]) else { panic!() };
    assert_eq!(gone.unlinked_inode, Some(inode));
    let Object::Regular(odd) = object(&image, guest.fds["odd"]) else { panic!() };
    assert_eq!(odd.unlinked_inode, None);
    assert!(odd.path.0.ends_with("/odd (deleted)"));
}

fn open_locks(directory: &Path, _: u32, opened: &mut Opened) {
    let file = |name: &str| {
        let path = directory.join(name);
        OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).unwrap()
    };
    let flock = file("flock");
    descriptor::lock_whole(flock.as_fd(), true).unwrap();
    let range = file("range");
    descriptor::lock_range(range.as_fd(), false, 10, 5).unwrap();
    let posix = file("posix");
    let lock = descriptor::lock_record(true, 3, 4);
    nix::fcntl::fcntl(&posix, nix::fcntl::FcntlArg::F_SETLK(&lock)).unwrap();
    opened.push(("flock", flock.into()));
    opened.push(("range", range.into()));
    opened.push(("posix", posix.into()));
}

#[test]
fn locks_of_descriptions_are_taken_again_and_those_of_processes_are_left_to_them() {
    let directory = scratch();
    let guest = Guest::start("locks", directory.path());
    let fds = guest.fds.clone();
    let image = capture(&guest).unwrap();
    let rules = guest.rules();
    // On a real failover the holder is on another host; here it has to go first.
    guest.end();
    let restored = common::try_restore(&image, &rules, &Parts::default()).unwrap();
    let again = File::open(directory.path().join("flock")).unwrap();
    Flock::lock(again, FlockArg::LockExclusiveNonblock).unwrap_err();
    let again = OpenOptions::new().write(true).read(true).open(directory.path().join("range"));
    let again = again.unwrap();
    descriptor::lock_range(again.as_fd(), true, 14, 1).unwrap_err();
    descriptor::lock_range(again.as_fd(), true, 15, 1).unwrap();
    let [step] = &restored.steps[..] else { panic!("{:?}", restored.steps) };
    let RemoteStep::Lock { process, fd, lock } = step else { panic!("{step:?}") };
    assert_eq!((*process, *fd), (GuestPid(2), fds["posix"]));
    assert_eq!((lock.kind, lock.exclusive), (LockKind::Posix, true));
    assert_eq!((lock.start, lock.length, lock.holder), (3, 4, GuestPid(2)));
}

#[test]
fn a_lock_that_somebody_else_holds_fails_the_restore() {
    let directory = scratch();
    let guest = Guest::start("locks", directory.path());
    let image = capture(&guest).unwrap();
    let error = common::try_restore(&image, &guest.rules(), &Parts::default()).unwrap_err();
    assert!(error.to_string().contains("lock of"), "{error}");
}

fn open_pipes(_: &Path, _: u32, opened: &mut Opened) {
    let (read, writer) = descriptor::pipe(0).unwrap();
    descriptor::set_pipe_capacity(read.as_fd(), 4 * 65536).unwrap();
    descriptor::set_status_flags(read.as_fd(), libc::O_NONBLOCK).unwrap();
    write(File::from(writer.try_clone().unwrap()), b"unread ");
    write(File::from(writer.try_clone().unwrap()), b"bytes");
    opened.push(("read", read));
    opened.push(("write", writer));
    let (lonely, other) = descriptor::pipe(0).unwrap();
    write(File::from(other), b"last words");
    opened.push(("lonely", lonely));
}

#[test]
fn a_pipe_keeps_its_bytes_on_both_sides() {
    let directory = scratch();
    let guest = Guest::start("pipes", directory.path());
    let image = capture(&guest).unwrap();
    assert_eq!(descriptor::readable_bytes(guest.take("read").as_fd()).unwrap(), 12);
    let ghost = Ghost::of(&guest, &image, &Parts::default());
    guest.end();
    assert_eq!(descriptor::pipe_capacity(ghost.fd("read").as_fd()).unwrap(), 4 * 65536);
    assert_eq!(flags(ghost.fd("read")), libc::O_NONBLOCK as u32);
    assert_eq!(flags(ghost.fd("write")), libc::O_WRONLY as u32);
    let mut buffer = [0; 100];
    let mut read = File::from(ghost.fd("read").try_clone().unwrap());
    write(File::from(ghost.fd("write").try_clone().unwrap()), b"!");
    let bytes = read.read(&mut buffer).unwrap();
    assert_eq!(&buffer[..bytes], b"unread bytes!");
}

#[test]
fn a_pipe_whose_writer_is_gone_ends_after_its_bytes() {
    let directory = scratch();
    let (_, ghost) = move_over(Guest::start("pipes", directory.path()));
    let mut all = Vec::new();
    File::from(ghost.fd("lonely").try_clone().unwrap()).read_to_end(&mut all).unwrap();
    assert_eq!(all, b"last words");
}

fn open_full_pipe(_: &Path, _: u32, opened: &mut Opened) {
    let (read, writer) = descriptor::pipe(libc::O_NONBLOCK).unwrap();
    let mut file = File::from(writer.try_clone().unwrap());
    let block: Vec<u8> = (0..=255).cycle().take(5000).collect();
    while file.write(&block).is_ok() {}
    let second = File::open(format!("/proc/self/fd/{}", read.as_raw_fd())).unwrap();
    opened.push(("read", read));
    opened.push(("second", second.into()));
    opened.push(("write", writer));
}

#[test]
fn a_full_pipe_with_two_readers_is_filled_once() {
    let directory = scratch();
    let guest = Guest::start("full pipe", directory.path());
    let unread = descriptor::readable_bytes(guest.take("read").as_fd()).unwrap();
    let (image, ghost) = move_over(guest);
    let carriers = image.files.iter().filter(|file| match &file.object {
        Object::Pipe(end) => end.contents.is_some(),
        _ => false,
    });
    assert_eq!(carriers.count(), 1);
    assert_eq!(descriptor::readable_bytes(ghost.fd("second").as_fd()).unwrap(), unread);
    assert_eq!(descriptor::readable_bytes(ghost.fd("read").as_fd()).unwrap(), unread);
    assert_eq!(flags(ghost.fd("second")), 0);
    assert_eq!(flags(ghost.fd("read")), libc::O_NONBLOCK as u32);
}

fn open_packets(_: &Path, _: u32, opened: &mut Opened) {
    let (read, writer) = descriptor::pipe(libc::O_DIRECT | libc::O_NONBLOCK).unwrap();
    write(File::from(writer.try_clone().unwrap()), b"one");
    write(File::from(writer.try_clone().unwrap()), b"three");
    opened.push(("read", read));
    opened.push(("write", writer));
}

#[test]
fn packets_of_a_pipe_stay_apart() {
    let directory = scratch();
    let (_, ghost) = move_over(Guest::start("packets", directory.path()));
    let mut read = File::from(ghost.fd("read").try_clone().unwrap());
    let mut buffer = [0; 100];
    assert_eq!(read.read(&mut buffer).unwrap(), 3);
    assert_eq!(read.read(&mut buffer).unwrap(), 5);
    read.read(&mut buffer).unwrap_err();
    assert_eq!(flags(ghost.fd("write")) & libc::O_DIRECT as u32, libc::O_DIRECT as u32);
}

fn open_fifo(directory: &Path, _: u32, opened: &mut Opened) {
    let path = directory.join("fifo");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let read = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
    let writer = OpenOptions::new().write(true).open(&path).unwrap();
    write(&writer, b"in the fifo");
    opened.push(("read", read.into()));
    opened.push(("write", writer.into()));
}

#[test]
fn a_fifo_keeps_its_bytes_and_its_path() {
    let directory = scratch();
    let guest = Guest::start("fifo", directory.path());
    let image = capture(&guest).unwrap();
    let ghost_parts = (guest.rules(), guest.fds.clone());
    guest.end();
    let restored = common::try_restore(&image, &ghost_parts.0, &Parts::default()).unwrap();
    let id = image.file_of(0, ghost_parts.1["read"]).id;
    let mut all = [0; 100];
    let read = &restored.files[&id];
    let bytes = File::from(read.try_clone().unwrap()).read(&mut all).unwrap();
    assert_eq!(&all[..bytes], b"in the fifo");
    let link = std::fs::read_link(format!("/proc/self/fd/{}", read.as_raw_fd())).unwrap();
    assert_eq!(link, directory.path().join("fifo"));
}

fn open_eventfds(_: &Path, _: u32, opened: &mut Opened) {
    opened.push(("counter", descriptor::eventfd(0x1234, libc::EFD_NONBLOCK).unwrap()));
    opened.push(("semaphore", descriptor::eventfd(3, libc::EFD_SEMAPHORE).unwrap()));
    opened.push(("empty", descriptor::eventfd(0, 0).unwrap()));
}

#[test]
fn eventfds_keep_count_and_kind() {
    let directory = scratch();
    let (_, ghost) = move_over(Guest::start("eventfds", directory.path()));
    let mut word = [0; 8];
    File::from(ghost.fd("counter").try_clone().unwrap()).read_exact(&mut word).unwrap();
    assert_eq!(u64::from_ne_bytes(word), 0x1234);
    assert_eq!(flags(ghost.fd("counter")), (libc::O_RDWR | libc::O_NONBLOCK) as u32);
    File::from(ghost.fd("semaphore").try_clone().unwrap()).read_exact(&mut word).unwrap();
    assert_eq!(u64::from_ne_bytes(word), 1);
    assert!(detail(ghost.fd("semaphore")).contains("eventfd-count:                2"));
    assert!(detail(ghost.fd("empty")).contains("eventfd-count:                0"));
}

const SECOND: u64 = 1_000_000_000;

fn open_timers(_: &Path, _: u32, opened: &mut Opened) {
    let timer = |clock, flags, value, interval| {
        let timer = descriptor::timerfd(clock, 0).unwrap();
        descriptor::set_timerfd(timer.as_fd(), flags, value, interval).unwrap();
        timer
    };
    opened.push(("idle", timer(libc::CLOCK_MONOTONIC, 0, 0, 0)));
    opened.push(("far", timer(libc::CLOCK_MONOTONIC, 0, 1000 * SECOND, 5 * SECOND)));
    let expired = timer(libc::CLOCK_MONOTONIC, 0, 1, 0);
    let periodic = timer(libc::CLOCK_MONOTONIC, 0, 1, 1000 * SECOND);
    for each in [&expired, &periodic] {
        let mut entry = [nix::poll::PollFd::new(each.as_fd(), nix::poll::PollFlags::POLLIN)];
        nix::poll::poll(&mut entry, nix::poll::PollTimeout::NONE).unwrap();
    }
    opened.push(("expired", expired));
    opened.push(("periodic", periodic));
    let absolute = libc::TFD_TIMER_ABSTIME | libc::TFD_TIMER_CANCEL_ON_SET;
    let far = 10_000_000_000 * SECOND;
    opened.push(("wall", timer(libc::CLOCK_REALTIME, absolute, far, 0)));
}

#[test]
fn timers_go_on_with_the_rest_of_their_time_and_their_ticks() {
    let directory = scratch();
    let (image, ghost) = move_over(Guest::start("timers", directory.path()));
    let seconds = |name: &str| {
        let lines = detail(ghost.fd(name));
        let at = lines.find("it_value: (").unwrap() + 11;
        let end = lines[at..].find(',').unwrap() + at;
        lines[at..end].parse::<u64>().unwrap()
    };
    assert!(detail(ghost.fd("idle")).contains("it_value: (0, 0)"));
    assert!((900..1000).contains(&seconds("far")));
    assert!(detail(ghost.fd("far")).contains("it_interval: (5, 0)"));
    assert!(detail(ghost.fd("expired")).contains("ticks: 1\n"));
    assert_eq!(seconds("expired"), 0);
    assert!(detail(ghost.fd("periodic")).contains("ticks: 1\n"));
    assert!((900..1000).contains(&seconds("periodic")));
    let wall = image.files.iter().find_map(|file| match &file.object {
        Object::TimerFd(timer) if timer.clock == libc::CLOCK_REALTIME => Some(timer),
        _ => None,
    });
    assert_eq!(wall.unwrap().settime_flags, 3);
    assert!(detail(ghost.fd("wall")).contains("settime flags: 03"));
}

fn open_signalfd(_: &Path, _: u32, opened: &mut Opened) {
    opened.push(("signals", descriptor::signalfd(0x8000_0000_0000_0601, 0).unwrap()));
}

#[test]
fn a_signalfd_keeps_its_signals() {
    let directory = scratch();
    let (_, ghost) = move_over(Guest::start("signalfd", directory.path()));
    let lines = detail(ghost.fd("signals"));
    assert!(lines.contains("sigmask:\t8000000000000601"), "{lines}");
}

fn watch(instance: &OwnedFd, path: &Path, mask: u32) -> i32 {
    let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    descriptor::add_watch(instance.as_fd(), &path, mask).unwrap()
}

fn open_inotify(directory: &Path, _: u32, opened: &mut Opened) {
    for name in ["a", "b", "c"] {
        std::fs::create_dir(directory.join(name)).unwrap();
    }
    let instance = descriptor::inotify(libc::IN_NONBLOCK).unwrap();
    assert_eq!(watch(&instance, &directory.join("a"), libc::IN_CREATE), 1);
    assert_eq!(watch(&instance, &directory.join("b"), libc::IN_CREATE), 2);
    assert_eq!(watch(&instance, &directory.join("c"), libc::IN_DELETE | libc::IN_ONLYDIR), 3);
    descriptor::remove_watch(instance.as_fd(), 1).unwrap();
    let mut event = [0; 64];
    nix::unistd::read(&instance, &mut event).unwrap();
    opened.push(("watching", instance));
    opened.push(("idle", descriptor::inotify(0).unwrap()));
}

#[test]
fn inotify_watches_keep_their_numbers_and_start_with_nothing_to_read() {
    let directory = scratch();
    let guest = Guest::start("inotify", directory.path());
    let before = {
        let path = format!("/proc/{}/fdinfo/{}", guest.host(), guest.fds["watching"]);
        std::fs::read_to_string(path).unwrap()
    };
    let (_, ghost) = move_over(guest);
    let after = detail(ghost.fd("watching"));
    assert!(before.ends_with(&after), "{before}\n{after}");
    assert_eq!(descriptor::readable_bytes(ghost.fd("watching").as_fd()).unwrap(), 0);
    File::create(directory.path().join("b/new")).unwrap();
    let mut event = [0; 64];
    nix::unistd::read(ghost.fd("watching"), &mut event).unwrap();
    assert_eq!(i32::from_ne_bytes(event[..4].try_into().unwrap()), 2);
    assert_eq!(&event[16..20], b"new\0");
}

fn open_inotify_unread(directory: &Path, turn: u32, opened: &mut Opened) {
    if turn == 0 {
        let instance = descriptor::inotify(0).unwrap();
        watch(&instance, directory, libc::IN_CREATE);
        File::create(directory.join("new")).unwrap();
        opened.push(("watching", instance));
    } else {
        nix::unistd::read(&opened[0].1, &mut [0; 64]).unwrap();
    }
}

#[test]
fn unread_inotify_events_put_the_checkpoint_off_until_they_are_read() {
    let directory = scratch();
    let mut guest = Guest::start("inotify unread", directory.path());
    let mut capturing = Capturing::of(&guest);
    let error = capturing.capture(&[guest.process()]).map(drop).unwrap_err();
    assert!(error.is_transient(), "{error}");
    guest.turn();
    capturing.capture(&[guest.process()]).unwrap();
}

#[test]
fn inotify_events_that_stay_unread_become_the_one_that_says_so() {
    let directory = scratch();
    let guest = Guest::start("inotify unread", directory.path());
    let mut capturing = Capturing::of(&guest);
    let image = loop {
        match capturing.capture(&[guest.process()]) {
            Ok(image) => break image,
            Err(error) => assert!(error.is_transient(), "{error}"),
        }
    };
    let ghost = Ghost::of(&guest, &image, &Parts::default());
    let instance = ghost.fd("watching");
    assert_eq!(descriptor::readable_bytes(instance.as_fd()).unwrap(), 16);
    let mut event = [0u8; 64];
    assert_eq!(nix::unistd::read(instance, &mut event).unwrap(), 16);
    assert_eq!(i32::from_ne_bytes(event[..4].try_into().unwrap()), -1);
    assert_eq!(u32::from_ne_bytes(event[4..8].try_into().unwrap()), libc::IN_Q_OVERFLOW);
    // And then what happens is told.
    File::create(directory.path().join("newer")).unwrap();
    nix::unistd::read(instance, &mut event).unwrap();
    assert_eq!(i32::from_ne_bytes(event[..4].try_into().unwrap()), 1);
    assert_eq!(&event[16..22], b"newer\0");
}

fn open_pidfds(_: &Path, _: u32, opened: &mut Opened) {
    let own = HostPid(std::process::id() as i32);
    opened.push(("self", descriptor::pidfd(own, libc::PIDFD_NONBLOCK as i32).unwrap()));
    opened.push(("ended", descriptor::pidfd_of_the_dead().unwrap()));
}

#[test]
fn pidfds_stand_for_the_ghosts_processes_and_for_the_dead() {
    let directory = scratch();
    let guest = Guest::start("pidfds", directory.path());
    let image = capture(&guest).unwrap();
    let mut parts = Parts::default();
    // The guest of this test has no pid namespace: its number is the host's.
    let own = HostPid(std::process::id() as i32);
    parts.processes.insert(GuestPid(guest.host().0), own);
    let ghost = Ghost::of(&guest, &image, &parts);
    assert!(detail(ghost.fd("self")).contains(&format!("Pid:\t{own}\n")));
    assert_eq!(flags(ghost.fd("self")), (libc::O_RDWR | libc::O_NONBLOCK) as u32);
    assert!(detail(ghost.fd("ended")).contains("Pid:\t-1\n"));
}

fn open_memfd(_: &Path, _: u32, opened: &mut Opened) {
    let memory = nix::sys::memfd::memfd_create(c"shared", nix::sys::memfd::MFdFlags::empty());
    let memory = memory.unwrap();
    let mut file = File::from(memory.try_clone().unwrap());
    write(&file, b"some bytes");
    file.seek(std::io::SeekFrom::Start(5)).unwrap();
    let reader = File::open(format!("/proc/self/fd/{}", memory.as_raw_fd())).unwrap();
    opened.push(("memory", memory));
    opened.push(("reader", reader.into()));
}

#[test]
fn descriptions_on_one_memfd_share_its_memory_but_not_their_offset() {
    let directory = scratch();
    let guest = Guest::start("memfd", directory.path());
    let image = capture(&guest).unwrap();
    let [memory] = &image.captured.memfds[..] else { panic!("{:?}", image.captured.memfds) };
    assert_eq!(memory.bytes, 10);
    let mut parts = Parts::default();
    parts.shared.insert(memory.object, guest.take("memory"));
    let ghost = Ghost::of(&guest, &image, &parts);
    guest.end();
    let mut file = File::from(ghost.fd("memory").try_clone().unwrap());
    let mut reader = File::from(ghost.fd("reader").try_clone().unwrap());
    assert_eq!(file.stream_position().unwrap(), 5);
    write(&file, b"BYTES");
    file.rewind().unwrap();
    let mut all = String::new();
    reader.read_to_string(&mut all).unwrap();
    assert_eq!(all, "some BYTES");
    assert_eq!(flags(ghost.fd("reader")), 0);
}

fn open_devices(_: &Path, _: u32, opened: &mut Opened) {
    let names = [("null", "/dev/null"), ("zero", "/dev/zero"), ("urandom", "/dev/urandom")];
    for (name, path) in names {
        let file = OpenOptions::new().read(true).write(name == "null").open(path).unwrap();
        opened.push((name, file.into()));
    }
}

#[test]
fn devices_without_state_are_opened_again_and_outside_descriptors_lead_to_null() {
    let directory = scratch();
    let guest = Guest::start("devices", directory.path());
    let (image, ghost) = move_over(guest);
    let mut byte = [1];
    File::from(ghost.fd("zero").try_clone().unwrap()).read_exact(&mut byte).unwrap();
    assert_eq!(byte, [0]);
    write(File::from(ghost.fd("null").try_clone().unwrap()), b"x");
    for standard in 0..2 {
        let file = image.file_of(0, standard);
        let Object::Outside(outside) = &file.object else { panic!("{file:?}") };
        assert_eq!((outside.standard, outside.kind.as_str()), (standard, "pipe"));
        let link = format!("/proc/self/fd/{}", ghost.restored.files[&file.id].as_raw_fd());
        assert_eq!(std::fs::read_link(link).unwrap(), Path::new("/dev/null"));
    }
}

fn open_terminal(_: &Path, _: u32, opened: &mut Opened) {
    let terminal = OpenOptions::new().read(true).write(true).open("/dev/ptmx").unwrap();
    opened.push(("terminal", terminal.into()));
}

fn open_namespace(_: &Path, _: u32, opened: &mut Opened) {
    opened.push(("net", File::open("/proc/self/ns/net").unwrap().into()));
}

#[test]
fn what_we_do_not_know_is_refused_by_name() {
    let directory = scratch();
    for (role, said) in [("terminal", "terminals that the program makes"), ("namespace", "net:[")] {
        let guest = Guest::start(role, directory.path());
        let error = capture(&guest).map(drop).unwrap_err();
        assert!(!error.is_transient());
        assert!(error.to_string().contains(said), "{error}");
    }
}

fn open_obstacles(directory: &Path, turn: u32, opened: &mut Opened) {
    open_terminal(directory, turn, opened);
    open_namespace(directory, turn, opened);
    opened.push(("file", File::create("/tmp/hotspare-obstacle").unwrap().into()));
    open_eventfds(directory, turn, opened);
}

#[test]
fn all_obstacles_of_a_program_are_told_at_once() {
    let directory = scratch();
    let guest = Guest::start("obstacles", directory.path());
    let mut capturing = Capturing::of(&guest);
    let found = capturing.kept.obstacles(&[guest.process()], &mut capturing.sockets).unwrap();
    assert_eq!(found.len(), 3, "{found:?}");
    for name in ["terminal", "net", "file"] {
        let number = format!("descriptor {}:", guest.fds[name]);
        assert!(found.iter().any(|error| error.to_string().contains(&number)), "{found:?}");
    }
    std::fs::remove_file("/tmp/hotspare-obstacle").unwrap();
}

fn add(instance: &OwnedFd, target: &OwnedFd, number: i32, events: u32, data: u64) {
    let (epoll, target) = (instance.as_fd(), target.as_fd());
    epoll::register(&[epoll::Registration { epoll, target, number, events, data }]).unwrap();
}

fn open_epoll(_: &Path, _: u32, opened: &mut Opened) {
    let instance = epoll::create().unwrap();
    let (read, writer) = descriptor::pipe(0).unwrap();
    let counter = descriptor::eventfd(1, 0).unwrap();
    let other = descriptor::eventfd(1, 0).unwrap();
    let (left, right) = std::os::unix::net::UnixStream::pair().unwrap();
    let (left, right) = (OwnedFd::from(left), OwnedFd::from(right));
    let nested = epoll::create().unwrap();
    let number = |file: &OwnedFd| file.as_raw_fd();
    add(&instance, &read, number(&read), libc::EPOLLIN as u32, 7);
    add(&instance, &writer, number(&writer), (libc::EPOLLOUT | libc::EPOLLET) as u32, u64::MAX);
    add(&instance, &counter, number(&counter), libc::EPOLLIN as u32, 9);
    add(&instance, &left, number(&left), (libc::EPOLLIN | libc::EPOLLONESHOT) as u32, 10);
    // Registered under a number that has meant something else since.
    add(&instance, &counter, number(&other), libc::EPOLLIN as u32, 11);
    add(&instance, &counter, 700, libc::EPOLLIN as u32, 12);
    add(&nested, &instance, number(&instance), libc::EPOLLIN as u32, 13);
    opened.push(("instance", instance));
    opened.push(("nested", nested));
    opened.push(("read", read));
    opened.push(("write", writer));
    opened.push(("counter", counter));
    opened.push(("other", other));
    opened.push(("left", left));
    opened.push(("right", right));
    opened.push(("empty", epoll::create().unwrap()));
}

/// The registrations of fdinfo without what is the kernel's own.
fn registrations(lines: &str) -> Vec<String> {
    let tfd = |line: &&str| line.starts_with("tfd:");
    let part = |line: &str| line.split(" pos:").next().unwrap().to_owned();
    lines.lines().filter(tfd).map(part).collect()
}

#[test]
fn epoll_registrations_are_made_under_the_guests_numbers_stale_ones_too() {
    let directory = scratch();
    let guest = Guest::start("epoll", directory.path());
    let of = |name: &str| {
        let path = format!("/proc/{}/fdinfo/{}", guest.host(), guest.fds[name]);
        registrations(&std::fs::read_to_string(path).unwrap())
    };
    let (instance, nested) = (of("instance"), of("nested"));
    assert_eq!(instance.len(), 6);
    let fds = guest.fds.clone();
    let image = capture(&guest).unwrap();
    let counter = image.file_of(0, fds["counter"]).id;
    let Object::Epoll(watches) = object(&image, fds["instance"]) else { panic!() };
    let by_data = |data| watches.watches.iter().find(|watch| watch.data == data).unwrap();
    assert_eq!(by_data(11).file, counter);
    assert_eq!((by_data(12).file, by_data(12).process), (counter, GuestPid(0)));
    let ghost = Ghost::of(&guest, &image, &Parts::default());
    let sorted = |mut lines: Vec<String>| {
        lines.sort();
        lines
    };
    assert_eq!(sorted(registrations(&detail(ghost.fd("instance")))), sorted(instance));
    assert_eq!(registrations(&detail(ghost.fd("nested"))), nested);
    assert_eq!(registrations(&detail(ghost.fd("empty"))).len(), 0);
    assert!(ghost.restored.steps.is_empty());
}

fn open_epoll_signalfd(_: &Path, _: u32, opened: &mut Opened) {
    let instance = epoll::create().unwrap();
    let signals = descriptor::signalfd(1 << 9, 0).unwrap();
    add(&instance, &signals, signals.as_raw_fd(), libc::EPOLLIN as u32, 5);
    opened.push(("instance", instance));
    opened.push(("signals", signals));
}

#[test]
fn a_watch_on_a_signalfd_is_left_to_the_process() {
    let directory = scratch();
    let guest = Guest::start("epoll signalfd", directory.path());
    let fds = guest.fds.clone();
    let (_, ghost) = move_over(guest);
    assert_eq!(registrations(&detail(ghost.fd("instance"))).len(), 0);
    let step = RemoteStep::Watch {
        process: GuestPid(2),
        epoll: fds["instance"],
        target: fds["signals"],
        events: (libc::EPOLLIN | libc::EPOLLERR | libc::EPOLLHUP) as u32,
        data: 5,
    };
    assert_eq!(ghost.restored.steps, [step]);
}

fn open_many(directory: &Path, turn: u32, opened: &mut Opened) {
    if turn == 0 {
        for _ in 0..50 {
            opened.push(("counter", descriptor::eventfd(7, 0).unwrap()));
            opened.push(("file", File::open(directory).unwrap().into()));
        }
    } else {
        // Numbers that meant one thing mean another now.
        let count = opened.len();
        opened.truncate(count / 2);
        for _ in 0..40 {
            opened.push(("epoll", epoll::create().unwrap()));
            opened.push(("clone", opened[0].1.try_clone().unwrap()));
        }
    }
}

#[test]
fn numbers_that_were_reused_are_seen_for_what_they_are_now() {
    let directory = scratch();
    let mut guest = Guest::start("many", directory.path());
    let mut capturing = Capturing::of(&guest);
    let count = |image: &common::Image, kind: fn(&Object) -> bool| {
        image.files.iter().filter(|file| kind(&file.object)).count()
    };
    let eventfd = |object: &Object| matches!(object, Object::EventFd(_));
    let epoll = |object: &Object| matches!(object, Object::Epoll(_));
    let directories = |object: &Object| matches!(object, Object::Directory(_));
    let first = capturing.capture(&[guest.process()]).unwrap();
    assert_eq!(count(&first, eventfd), 50);
    assert_eq!(count(&first, directories), 50);
    for _ in 0..3 {
        guest.turn();
        let mut anew = Capturing::of(&guest);
        let cached = capturing.capture(&[guest.process()]).unwrap();
        let fresh = anew.capture(&[guest.process()]).unwrap();
        assert_eq!(cached.files.len(), fresh.files.len());
        assert_eq!(count(&cached, epoll), count(&fresh, epoll));
        assert_eq!(count(&cached, eventfd), count(&fresh, eventfd));
        let shape = |image: &common::Image| -> Vec<(i32, bool)> {
            let first = image.tables[0].iter().find(|each| each.fd == guest.fds["clone"]);
            let file = first.unwrap().file;
            image.tables[0].iter().map(|each| (each.fd, each.file == file)).collect()
        };
        assert_eq!(shape(&cached), shape(&fresh));
    }
}

fn open_renamed(directory: &Path, turn: u32, opened: &mut Opened) {
    let (old, new) = (directory.join("old"), directory.join("new"));
    if turn == 0 {
        opened.push(("file", File::create(&old).unwrap().into()));
    } else {
        std::fs::rename(&old, &new).unwrap();
    }
}

#[test]
fn a_file_that_was_renamed_is_captured_under_its_new_name() {
    let directory = scratch();
    let mut guest = Guest::start("renamed", directory.path());
    let mut capturing = Capturing::of(&guest);
    let path = |image: &common::Image, guest: &Guest| match object(image, guest.fds["file"]) {
        Object::Regular(file) => file.path.0.clone(),
        other => panic!("{other:?}"),
    };
    let first = capturing.capture(&[guest.process()]).unwrap();
    assert!(path(&first, &guest).ends_with("/old"));
    guest.turn();
    let second = capturing.capture(&[guest.process()]).unwrap();
    assert!(path(&second, &guest).ends_with("/new"));
}

fn open_in_flight(_: &Path, _: u32, opened: &mut Opened) {
    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
    let (left, right) = std::os::unix::net::UnixStream::pair().unwrap();
    let (read, writer) = descriptor::pipe(0).unwrap();
    let counter = descriptor::eventfd(77, 0).unwrap();
    write(File::from(writer.try_clone().unwrap()), b"travelling");
    let fds = [read.as_raw_fd(), counter.as_raw_fd()];
    let bytes = [std::io::IoSlice::new(b"x")];
    let rights = [ControlMessage::ScmRights(&fds)];
    sendmsg::<()>(left.as_raw_fd(), &bytes, &rights, MsgFlags::empty(), None).unwrap();
    opened.push(("left", left.into()));
    opened.push(("right", right.into()));
    opened.push(("write", writer));
    opened.push(("counter", counter));
    // `read` is open in the queue only.
}

#[test]
fn files_in_flight_are_captured_and_known_ones_recognised() {
    let directory = scratch();
    let guest = Guest::start("in flight", directory.path());
    let image = capture(&guest).unwrap();
    let counter = image.file_of(0, guest.fds["counter"]).id;
    let queued: Vec<_> = image
        .files
        .iter()
        .filter_map(|file| match &file.object {
            Object::Unix(socket) => Some(socket.queue.iter().flat_map(|message| &message.files)),
            _ => None,
        })
        .flatten()
        .copied()
        .collect();
    assert_eq!(queued.len(), 2);
    assert_eq!(queued[1], counter);
    let travelling = image.files.iter().find(|file| file.id == queued[0]).unwrap();
    let Object::Pipe(_) = &travelling.object else { panic!("{travelling:?}") };
    let ghost = Ghost::of(&guest, &image, &Parts::default());
    guest.end();
    let read = &ghost.restored.files[&queued[0]];
    assert_eq!(descriptor::readable_bytes(read.as_fd()).unwrap(), 10);
}

fn open_owner(_: &Path, _: u32, opened: &mut Opened) {
    let (read, writer) = descriptor::pipe(0).unwrap();
    descriptor::set_status_flags(read.as_fd(), libc::O_ASYNC).unwrap();
    opened.push(("read", read));
    opened.push(("write", writer));
}

#[test]
fn a_file_that_signals_is_armed_by_the_process() {
    let directory = scratch();
    let guest = Guest::start("owner", directory.path());
    let fds = guest.fds.clone();
    let (_, ghost) = move_over(guest);
    assert_eq!(flags(ghost.fd("read")) & libc::O_ASYNC as u32, 0);
    let armed = ghost.restored.steps.iter().any(|step| match step {
        RemoteStep::SetFlags { fd, flags, .. } => {
            *fd == fds["read"] && flags & libc::O_ASYNC as u32 != 0
        }
        _ => false,
    });
    assert!(armed, "{:?}", ghost.restored.steps);
}

/// Starts this program once more with `files` at the same numbers; it waits until it is killed.
fn have_child(files: &[&OwnedFd]) -> (u32, OwnedFd, OwnedFd) {
    for file in files {
        let keep = nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty());
        nix::fcntl::fcntl(file, keep).unwrap();
    }
    let mut child = std::process::Command::new("/bin/sh");
    child.args(["-c", "echo; read line"]);
    child.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    #[expect(clippy::zombie_processes, reason = "this process is killed by the test")]
    let mut child = child.spawn().unwrap();
    let (input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    // It has run exec(2) when it says something.
    output.read_exact(&mut [0]).unwrap();
    (child.id(), input.into(), output.into())
}

fn open_family(directory: &Path, _: u32, opened: &mut Opened) {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true);
    let file = OwnedFd::from(options.open(directory.join("shared")).unwrap());
    let lock = descriptor::lock_record(true, 0, 0);
    nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_SETLK(&lock)).unwrap();
    let own = OwnedFd::from(File::open("/dev/null").unwrap());
    // It ends when its pipes do, which is when we do.
    let (child, input, output) = have_child(&[&file]);
    println!("@child {child}");
    opened.push(("input", input));
    opened.push(("output", output));
    opened.push(("file", file));
    opened.push(("own", own));
}

#[test]
fn processes_share_descriptions_and_a_lock_belongs_to_its_holder() {
    let directory = scratch();
    let guest = Guest::start("family", directory.path());
    let child = HostPid(guest.fds["child"]);
    let pidfd = hotspare_kernel::pidfd::open(child).unwrap();
    let second = hotspare_process::objects::table::GuestProcess {
        host: child,
        pid: GuestPid(3),
        pidfd: pidfd.as_fd(),
    };
    let mut capturing = Capturing::of(&guest);
    for _ in 0..2 {
        let image = capturing.capture(&[guest.process(), second]).unwrap();
        let number = guest.fds["file"];
        let (parents, childs) = (image.file_of(0, number), image.file_of(1, number));
        assert_eq!(parents.id, childs.id);
        assert!(image.tables[1].iter().all(|each| each.fd != guest.fds["own"]));
        let Object::Regular(file) = &parents.object else { panic!("{parents:?}") };
        let [lock] = &file.locks[..] else { panic!("{file:?}") };
        assert_eq!(lock.holder, GuestPid(2));
        let flag = |process: usize| {
            image.tables[process].iter().find(|each| each.fd == number).unwrap().close_on_exec
        };
        assert!(!flag(0) && !flag(1));
    }
}

fn open_loner(_: &Path, _: u32, opened: &mut Opened) {
    let (ready, is_ready) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_FILES).unwrap();
        ready.send(nix::unistd::gettid().as_raw()).unwrap();
        std::thread::park();
    });
    println!("@thread {}", is_ready.recv().unwrap());
    opened.push(("null", File::open("/dev/null").unwrap().into()));
}

#[test]
fn a_thread_with_a_table_of_its_own_is_refused() {
    let directory = scratch();
    let guest = Guest::start("loner", directory.path());
    let mut capturing = Capturing::of(&guest);
    capturing.capture(&[guest.process()]).unwrap();
    let same = [guest.host(); 20];
    capturing.kept.check_threads(&guest.process(), &same).unwrap();
    let mut threads = same;
    threads[17] = HostPid(guest.fds["thread"]);
    capturing.kept.check_threads(&guest.process(), &threads).unwrap();
    let error = capturing.kept.check_threads(&guest.process(), &threads).unwrap_err();
    assert!(error.to_string().contains("descriptor table of its own"), "{error}");
}

fn queue_name() -> String {
    format!("hotspare-test-{}", std::process::id())
}

fn open_queue(_: &Path, _: u32, opened: &mut Opened) {
    let name = std::ffi::CString::new(queue_name()).unwrap();
    descriptor::create_queue(&name, 0o600).unwrap();
    let queue = descriptor::open_queue(&name, libc::O_RDWR | libc::O_NONBLOCK).unwrap();
    opened.push(("queue", queue));
}

#[test]
fn a_message_queue_is_opened_by_its_name() {
    let directory = scratch();
    let guest = Guest::start("queue", directory.path());
    let (image, ghost) = move_over(guest);
    let name = image.files.iter().find_map(|file| match &file.object {
        Object::MessageQueue(queue) => Some(queue.name.clone()),
        _ => None,
    });
    let name = name.unwrap();
    let link = format!("/proc/self/fd/{}", ghost.fd("queue").as_raw_fd());
    assert_eq!(std::fs::read_link(link).unwrap().to_str(), Some(name.as_str()));
    assert_eq!(flags(ghost.fd("queue")), (libc::O_RDWR | libc::O_NONBLOCK) as u32);
    descriptor::remove_queue(&std::ffi::CString::new(&name[1..]).unwrap()).unwrap();
}
