//! AF_UNIX, UDP and netlink sockets, captured in one network namespace, restored in another.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::PathBuf;

use hotspare_image::objects::{FileId, FileOwner, Object, OpenFile};
use hotspare_image::tree::{ClockReading, GuestPid, HostPath};
use hotspare_kernel::descriptor;
use hotspare_kernel::segment::SegmentSender;
use hotspare_kernel::socket::{self, Outgoing};
use hotspare_process::objects::error::{ObjectError, ObjectResult};
use hotspare_process::objects::restore::{NoParts, RestoreContext, own_descriptors};
use hotspare_process::objects::rules::FileRules;
use hotspare_process::objects::socket::{SocketCapture, go_live, settle};
use hotspare_process::objects::unix::{GuestView, Made, SocketPairs};
use hotspare_process::objects::{self, udp};
use nix::sched::{CloneFlags, unshare};

/// Runs `work` on a thread in a network namespace of its own, with the loopback interface up.
fn in_new_net<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_FS).expect("needs root");
            let up = std::process::Command::new("ip").args(["link", "set", "lo", "up"]).status();
            assert!(up.expect("run ip").success());
            work()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn inode(fd: BorrowedFd<'_>) -> u64 {
    std::fs::metadata(format!("/proc/self/fd/{}", fd.as_raw_fd())).expect("stat").ino()
}

/// Descriptors on their way are known by their inode.
#[derive(Default)]
struct TestGuest {
    ids: BTreeMap<u64, FileId>,
    directories: Vec<HostPath>,
    extra: Vec<OwnedFd>,
}

impl TestGuest {
    fn in_flight(&mut self, file: OwnedFd) -> ObjectResult<FileId> {
        let next = FileId(1000 + self.ids.len() as u32);
        let id = *self.ids.entry(inode(file.as_fd())).or_insert(next);
        self.extra.push(file);
        Ok(id)
    }
}

struct View(Vec<HostPath>);

impl GuestView for View {
    fn guest_pid(&self, host: i32) -> GuestPid {
        GuestPid(host)
    }
    fn root(&self) -> PathBuf {
        "/".into()
    }
    fn working_directories(&self) -> Vec<HostPath> {
        self.0.clone()
    }
}

/// Status flags that fcntl(2) shows of the sockets here.
const FLAGS: u32 = (libc::O_RDWR | libc::O_NONBLOCK) as u32;

fn try_capture(guest: &mut TestGuest, sockets: &[&dyn AsFd]) -> ObjectResult<Vec<OpenFile>> {
    let net = std::fs::File::open("/proc/thread-self/ns/net").expect("open");
    let mut capture = SocketCapture::open(net.as_fd()).expect("open");
    capture_again(&mut capture, guest, sockets)
}

fn capture_again(
    capture: &mut SocketCapture,
    guest: &mut TestGuest,
    sockets: &[&dyn AsFd],
) -> ObjectResult<Vec<OpenFile>> {
    capture.begin_epoch();
    for (number, socket) in sockets.iter().enumerate() {
        guest.ids.insert(inode(socket.as_fd()), FileId(number as u32));
    }
    let files = sockets.iter().enumerate().map(|(number, socket)| {
        let fd = socket.as_fd();
        let view = View(guest.directories.clone());
        let object = capture.capture(fd, inode(fd), &view, &mut |file| guest.in_flight(file))?;
        let owner = FileOwner::default();
        Ok(OpenFile { id: FileId(number as u32), flags: FLAGS, owner, object })
    });
    let mut files = files.collect::<ObjectResult<Vec<_>>>()?;
    settle(&mut files)?;
    Ok(files)
}

fn capture(sockets: &[&dyn AsFd]) -> Vec<OpenFile> {
    try_capture(&mut TestGuest::default(), sockets).expect("capture")
}

struct Ghost(Made);

impl Ghost {
    fn file(&self, number: u32) -> BorrowedFd<'_> {
        self.0[&FileId(number)].as_fd()
    }
    fn take<T: From<OwnedFd>>(&mut self, number: u32) -> T {
        self.0.remove(&FileId(number)).expect("restored").into()
    }
}

/// Restores on the calling thread, with `others` as further open files.
fn restore(files: &[OpenFile], others: Vec<(FileId, OwnedFd)>) -> Ghost {
    let mut made = others.into_iter().collect();
    let (rules, clocks) = (FileRules::default(), ClockReading::default());
    let context = RestoreContext::new(&NoParts, &rules, clocks, 0, own_descriptors().unwrap());
    let pairs = SocketPairs::default();
    objects::socket::restore(files, &context, pairs, &mut made, &|guest| Some(guest.0))
        .expect("restore");
    go_live(files, &made).expect("go live");
    for file in files {
        let flags = descriptor::status_flags(made[&file.id].as_fd()).expect("get flags");
        assert_eq!(flags as u32 & FLAGS, FLAGS);
        descriptor::set_status_flags(made[&file.id].as_fd(), 0).expect("set flags");
    }
    Ghost(made)
}

#[test]
fn a_stream_pair_keeps_its_bytes_and_its_options() {
    let files = in_new_net(|| {
        let (a, mut b) = UnixStream::pair().expect("pair");
        b.write_all(&[7; 50_000]).expect("write");
        a.set_read_timeout(Some(std::time::Duration::from_secs(3))).expect("set");
        let files = capture(&[&a, &b]);
        assert_eq!(files, capture(&[&a, &b]), "a capture changes nothing");
        files
    });
    in_new_net(|| {
        let mut ghost = restore(&files, vec![]);
        let (mut a, mut b): (UnixStream, UnixStream) = (ghost.take(0), ghost.take(1));
        assert_eq!(a.read_timeout().expect("get"), Some(std::time::Duration::from_secs(3)));
        a.write_all(b"back").expect("write");
        let mut back = [0; 4];
        b.read_exact(&mut back).expect("read");
        drop(b);
        let mut bytes = Vec::new();
        a.read_to_end(&mut bytes).expect("read");
        assert_eq!((bytes, &back), (vec![7; 50_000], b"back"));
    });
}

#[test]
fn a_peer_that_closed_leaves_its_last_words() {
    let files = in_new_net(|| {
        let (a, mut b) = UnixStream::pair().expect("pair");
        b.write_all(b"last words").expect("write");
        drop(b);
        capture(&[&a])
    });
    in_new_net(|| {
        let mut a: UnixStream = restore(&files, vec![]).take(0);
        let mut text = String::new();
        a.read_to_string(&mut text).expect("read");
        assert_eq!(text, "last words");
        assert_eq!(a.write(b"x").expect_err("broken").kind(), std::io::ErrorKind::BrokenPipe);
    });
}

#[test]
fn packets_keep_their_borders_and_descriptors_on_their_way_arrive() {
    let (read_end, write_end) = nix::unistd::pipe().expect("pipe");
    let files = in_new_net(|| {
        let (a, b) = socket::pair(libc::AF_UNIX, libc::SOCK_SEQPACKET).expect("pair");
        let passed = [write_end.as_fd()];
        let with_file = Outgoing { bytes: b"one", files: &passed, ..Outgoing::default() };
        socket::send_message(b.as_fd(), with_file).expect("send");
        socket::send(b.as_fd(), b"three", 0).expect("send");
        let mut guest = TestGuest::default();
        guest.ids.insert(inode(write_end.as_fd()), FileId(70));
        try_capture(&mut guest, &[&a, &b]).expect("capture")
    });
    in_new_net(|| {
        let ghost = restore(&files, vec![(FileId(70), write_end)]);
        let a = ghost.file(0);
        let first = socket::receive_message(a, 100, 0).expect("receive").expect("there");
        assert_eq!((&first.bytes[..], first.files.len()), (&b"one"[..], 1));
        nix::unistd::write(&first.files[0], b"!").expect("write");
        let mut byte = [0];
        nix::unistd::read(&read_end, &mut byte).expect("read");
        let second = socket::receive_message(a, 100, 0).expect("receive").expect("there");
        assert_eq!((&second.bytes[..], byte), (&b"three"[..], *b"!"));
    });
}

#[test]
fn a_listener_keeps_who_is_connected_and_who_waits() {
    let directory = tempfile_directory("listener");
    let path = directory.join("service");
    let files = in_new_net(|| {
        let listener = UnixListener::bind(&path).expect("bind");
        let mut called = UnixStream::connect(&path).expect("connect");
        let (accepted, _) = listener.accept().expect("accept");
        let waits = UnixStream::connect(&path).expect("connect");
        called.write_all(b"hello").expect("write");
        capture(&[&accepted, &called, &waits, &listener])
    });
    in_new_net(|| {
        let mut ghost = restore(&files, vec![]);
        let mut accepted: UnixStream = ghost.take(0);
        let called: UnixStream = ghost.take(1);
        let mut waits: UnixStream = ghost.take(2);
        let listener: UnixListener = ghost.take(3);
        let peer = called.peer_addr().expect("peer");
        assert_eq!(peer.as_pathname(), Some(path.as_path()));
        let mut word = [0; 5];
        accepted.read_exact(&mut word).expect("read");
        let (mut late, _) = listener.accept().expect("accept");
        waits.write_all(&word).expect("write");
        late.read_exact(&mut word).expect("read");
        assert_eq!(&word, b"hello");
        UnixStream::connect(&path).expect("new clients can call");
    });
    std::fs::remove_dir_all(directory).expect("clean up");
}

#[test]
fn a_relative_name_is_bound_in_its_directory() {
    let directory = tempfile_directory("relative");
    let files = in_new_net(|| {
        std::env::set_current_dir(&directory).expect("enter");
        let listener = UnixListener::bind("service").expect("bind");
        let here = HostPath(directory.to_str().expect("text").into());
        let mut guest = TestGuest { directories: vec![here], ..TestGuest::default() };
        try_capture(&mut guest, &[&listener]).expect("capture")
    });
    in_new_net(|| {
        let listener: UnixListener = restore(&files, vec![]).take(0);
        let name = listener.local_addr().expect("name");
        assert_eq!(name.as_pathname(), Some(std::path::Path::new("service")));
        UnixStream::connect(directory.join("service")).expect("connect");
    });
    std::fs::remove_dir_all(directory).expect("clean up");
}

#[test]
fn datagrams_keep_their_senders() {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::SocketAddr;
    let address = |name: &str| SocketAddr::from_abstract_name(name).expect("a name");
    let files = in_new_net(|| {
        let server = UnixDatagram::bind_addr(&address("server")).expect("bind");
        let client = UnixDatagram::bind_addr(&address("client")).expect("bind");
        client.connect_addr(&address("server")).expect("connect");
        client.send(b"first").expect("send");
        client.send(b"second").expect("send");
        capture(&[&server, &client])
    });
    in_new_net(|| {
        let mut ghost = restore(&files, vec![]);
        let (server, client): (UnixDatagram, UnixDatagram) = (ghost.take(0), ghost.take(1));
        let mut buffer = [0; 100];
        for expected in ["first", "second"] {
            let (length, from) = server.recv_from(&mut buffer).expect("receive");
            assert_eq!(&buffer[..length], expected.as_bytes());
            assert_eq!(from.as_abstract_name(), Some(&b"client"[..]));
        }
        client.send(b"third").expect("send");
        assert_eq!(server.recv(&mut buffer).expect("receive"), 5);
    });
}

#[test]
fn bytes_on_a_connection_that_is_not_accepted_have_to_pass() {
    let directory = tempfile_directory("pass");
    in_new_net(|| {
        let path = directory.join("service");
        let listener = UnixListener::bind(&path).expect("bind");
        let mut waits = UnixStream::connect(&path).expect("connect");
        waits.write_all(b"too early").expect("write");
        let outcome = try_capture(&mut TestGuest::default(), &[&listener, &waits]);
        assert!(matches!(outcome, Err(ObjectError::Transient { .. })), "{outcome:?}");
    });
    std::fs::remove_dir_all(directory).expect("clean up");
}

#[test]
fn bytes_that_stay_on_a_connection_that_is_not_accepted_mean_a_reset() {
    let directory = tempfile_directory("stay");
    let path = directory.join("service");
    let files = in_new_net(|| {
        let listener = UnixListener::bind(&path).expect("bind");
        let mut waits = UnixStream::connect(&path).expect("connect");
        waits.write_all(b"too early").expect("write");
        let silent = UnixStream::connect(&path).expect("connect");
        let net = std::fs::File::open("/proc/thread-self/ns/net").expect("open");
        let mut capture = SocketCapture::open(net.as_fd()).expect("open");
        let sockets: [&dyn AsFd; 3] = [&listener, &waits, &silent];
        loop {
            match capture_again(&mut capture, &mut TestGuest::default(), &sockets) {
                Ok(files) => break files,
                Err(error) => assert!(error.is_transient(), "{error}"),
            }
        }
    });
    in_new_net(|| {
        let mut ghost = restore(&files, vec![]);
        let listener: UnixListener = ghost.take(0);
        let (mut waits, mut silent): (UnixStream, UnixStream) = (ghost.take(1), ghost.take(2));
        let mut byte = [0];
        let error = waits.read(&mut byte).expect_err("is reset");
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        assert_eq!(waits.read(&mut byte).expect("has ended"), 0);
        let (mut accepted, _) = listener.accept().expect("accept");
        accepted.write_all(b"!").expect("write");
        assert_eq!(silent.read(&mut byte).expect("read"), 1);
        listener.set_nonblocking(true).expect("set");
        assert!(listener.accept().is_err(), "only one waits");
    });
    std::fs::remove_dir_all(directory).expect("clean up");
}

#[test]
fn a_connection_to_a_server_outside_is_refused() {
    let directory = tempfile_directory("outside");
    let path = directory.join("service");
    let outside = UnixListener::bind(&path).expect("bind");
    in_new_net(|| {
        let socket = UnixStream::connect(&path).expect("connect");
        let (_accepted, _) = outside.accept().expect("accept");
        let outcome = try_capture(&mut TestGuest::default(), &[&socket]);
        let Err(ObjectError::Refused { reason, .. }) = outcome else { panic!("{outcome:?}") };
        assert!(reason.contains("outside"), "{reason}");
    });
    std::fs::remove_dir_all(directory).expect("clean up");
}

#[test]
fn to_a_server_in_the_guest_a_client_outside_is_gone() {
    let directory = tempfile_directory("caller");
    let path = directory.join("service");
    let (listener, mut client, files) = in_new_net(|| {
        let listener = UnixListener::bind(&path).expect("bind");
        let client = in_new_net(|| UnixStream::connect(&path)).expect("connect");
        let (accepted, _) = listener.accept().expect("accept");
        let files = capture(&[&listener, &accepted]);
        (listener, client, files)
    });
    drop(listener);
    assert_eq!(client.read(&mut [0; 10]).expect("end of file"), 0);
    in_new_net(|| {
        let mut ghost = restore(&files, vec![]);
        let mut accepted: UnixStream = ghost.take(1);
        assert_eq!(accepted.read(&mut [0; 10]).expect("end of file"), 0);
    });
    std::fs::remove_dir_all(directory).expect("clean up");
}

#[test]
fn udp_sockets_keep_what_waits_in_them() {
    let udp = |address: &str| std::net::UdpSocket::bind(address).expect("bind");
    let (files, from) = in_new_net(|| {
        let (server, client) = (udp("127.0.0.1:5353"), udp("127.0.0.1:0"));
        let server6 = udp("[::]:5354");
        client.send_to(b"one", "127.0.0.1:5353").expect("send");
        client.send_to(b"", "127.0.0.1:5353").expect("send");
        client.send_to(b"three", "127.0.0.1:5353").expect("send");
        client.send_to(b"four", "127.0.0.1:5353").expect("send");
        server6.connect("[::1]:99").expect("connect");
        (capture(&[&server, &server6]), client.local_addr().expect("bound"))
    });
    in_new_net(|| {
        let mut ghost = restore(&files, vec![]);
        let (server, server6): (std::net::UdpSocket, std::net::UdpSocket) =
            (ghost.take(0), ghost.take(1));
        let mut buffer = [0; 100];
        for expected in ["one", "", "three", "four"] {
            let (length, sender) = server.recv_from(&mut buffer).expect("receive");
            assert_eq!((&buffer[..length], sender), (expected.as_bytes(), from));
        }
        assert_eq!(server6.peer_addr().expect("peer").port(), 99);
        let Object::Udp(image) = &files[0].object else { panic!("UDP") };
        assert_eq!(udp::go_live(image, &SegmentSender::open().expect("raw sockets")), 4);
    });
}

#[test]
fn a_quiet_netlink_socket_survives_a_busy_one_has_to_pass() {
    let files = in_new_net(|| {
        let fd = socket::create(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE);
        let fd = fd.expect("create");
        let mut address = vec![0u8; 12];
        address[..2].copy_from_slice(&(libc::AF_NETLINK as u16).to_ne_bytes());
        address[4..8].copy_from_slice(&4242u32.to_ne_bytes());
        socket::bind(fd.as_fd(), &address).expect("bind");
        let group = 5u32.to_ne_bytes();
        let join = libc::NETLINK_ADD_MEMBERSHIP;
        socket::set_option(fd.as_fd(), libc::SOL_NETLINK, join, &group).expect("join");
        let files = capture(&[&fd]);
        // RTM_GETLINK, a dump.
        let mut request = Vec::new();
        request.extend(32u32.to_ne_bytes());
        request.extend(18u16.to_ne_bytes());
        request.extend(0x301u16.to_ne_bytes());
        request.extend([0; 24]);
        socket::send(fd.as_fd(), &request, 0).expect("send");
        let outcome = try_capture(&mut TestGuest::default(), &[&fd]);
        assert!(matches!(outcome, Err(ObjectError::Transient { .. })), "{outcome:?}");
        files
    });
    in_new_net(|| {
        let ghost = restore(&files, vec![]);
        let fd = ghost.file(0);
        let address = socket::local_address(fd).expect("name");
        assert_eq!(address[4..8], 4242u32.to_ne_bytes());
        assert_eq!(address[8..12], (1u32 << 4).to_ne_bytes());
    });
}

fn tempfile_directory(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("hotspare-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&path).expect("make a directory");
    path
}
