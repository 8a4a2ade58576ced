//! An agent that is killed must go away, whatever is under way.
//!
//! A thread of it that waits for its own file system stays for ever where the descriptor table it
//! uses holds `/dev/fuse`. Each scene here hangs when what it is about is done in that table.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hotspare_files::{ReplicatedDir, Role};
use hotspare_image::objects::{FileId, FileOwner, Object, OpenFile};
use hotspare_image::sockets::{SocketAddress, UnixSocket};
use hotspare_image::tree::{ClockReading, HostPath};
use hotspare_kernel::opener::Opener;
use hotspare_process::objects::restore::{NoParts, RestoreContext, own_descriptors, restore_all};
use hotspare_process::objects::rules::{FileRules, Standing};
use nix::sched::{CloneFlags, unshare};
use nix::sys::ptrace::{self, Options};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// Set for the agent: the directory that has `backing` and `mount`.
const AGENT: &str = "HOTSPARE_TEST_AGENT";
/// What it is to do.
const WORK: &str = "HOTSPARE_TEST_WORK";
const HANG: Duration = Duration::from_secs(30);

/// Serves and does its work for ever. Does nothing when it is run as a test.
#[test]
fn agent() {
    let Some(directory) = std::env::var_os(AGENT) else { return };
    let directory = Path::new(&directory);
    let (backing, mount) = (directory.join("backing"), directory.join("mount"));
    let served = ReplicatedDir::serve(&backing, &mount, Role::Primary).unwrap();
    let opener = Opener::start().unwrap();
    match std::env::var(WORK).unwrap().as_str() {
        "flush" => {
            drop(served.initial_copy());
            // As one that is restored for the guest: the agent has it, too.
            let file = mount.join("file");
            let _own = opener.open(&file, libc::O_RDWR).unwrap();
            loop {
                served.flush().unwrap();
                drop(served.cut().unwrap());
            }
        }
        "open" => {
            // The test says when.
            std::io::stdin().read_line(&mut String::new()).unwrap();
            drop(opener.open(&mount.join("file"), libc::O_RDONLY).unwrap());
        }
        "bind" => {
            std::io::stdin().read_line(&mut String::new()).unwrap();
            // As at a takeover, on a thread whose working directory is its own.
            let mount = mount.clone();
            let restored = std::thread::spawn(move || {
                unshare(CloneFlags::CLONE_FS).unwrap();
                restore_listener(&mount);
            });
            restored.join().unwrap();
        }
        other => panic!("{other}"),
    }
}

/// Makes a guest's UNIX socket that listens at `mount/socket`.
fn restore_listener(mount: &Path) {
    let path = mount.join("socket").to_str().unwrap().to_owned();
    let family = (libc::AF_UNIX as u16).to_ne_bytes();
    let address = SocketAddress([&family[..], path.as_bytes(), &[0]].concat());
    let socket = UnixSocket {
        inode: 1,
        kind: libc::SOCK_STREAM,
        address: Some(address),
        path: Some(HostPath(path)),
        backlog: Some(1),
        waiting: Vec::new(),
        peer: None,
        queue: Vec::new(),
        shutdown: 0,
        options: Vec::new(),
        connected: false,
        remote: None,
        peer_credentials: None,
        maker: None,
        reset: false,
    };
    let (id, owner) = (FileId(1), FileOwner::default());
    let file = OpenFile { id, flags: libc::O_RDWR as u32, owner, object: Object::Unix(socket) };
    let rules = FileRules::new([(mount.to_str().unwrap().to_owned(), Standing::Replicated)]);
    let own = own_descriptors().unwrap();
    let context = RestoreContext::new(&NoParts, &rules, ClockReading::default(), 0, own);
    let restored = restore_all(&[file], &[], &context).unwrap();
    assert!(mount.join("socket").exists(), "it was bound");
    drop(restored);
}

/// Writes to a mapping of a file for ever.
const WRITER: &str = "
import mmap, sys
with open(sys.argv[1], 'r+b') as file:
    memory = mmap.mmap(file.fileno(), 1 << 20)
    while True:
        for page in range(256):
            memory[page << 12] = (memory[page << 12] + 1) & 255
";

/// Lets nobody open a file: says `ready`, and `waits` when somebody tries (fanotify(7)).
const BLOCKER: &str = "
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
FAN_CLASS_CONTENT, FAN_MARK_ADD, FAN_OPEN_PERM, AT_FDCWD = 4, 1, 0x10000, -100
group = libc.fanotify_init(FAN_CLASS_CONTENT, os.O_RDONLY)
path = sys.argv[1].encode()
marked = libc.fanotify_mark(group, FAN_MARK_ADD, ctypes.c_uint64(FAN_OPEN_PERM), AT_FDCWD, path)
assert group >= 0 and marked == 0, os.strerror(ctypes.get_errno())
print('ready', flush=True)
os.read(group, 4096)
print('waits', flush=True)
sys.stdin.read()
";

/// An agent at work in a directory of its own. Whatever hangs is let go when this is dropped.
struct Scene {
    agent: Child,
    /// Number of the FUSE connection.
    connection: u64,
    directory: tempfile::TempDir,
}

impl Scene {
    fn new(work: &str) -> Scene {
        let directory = tempfile::tempdir().unwrap();
        for name in ["backing", "mount"] {
            std::fs::create_dir(directory.path().join(name)).unwrap();
        }
        std::fs::write(directory.path().join("backing/file"), vec![1; 1 << 20]).unwrap();
        let mut agent = Command::new(std::env::current_exe().unwrap());
        agent.args(["--exact", "agent"]).env(AGENT, directory.path()).env(WORK, work);
        agent.stdin(Stdio::piped());
        let agent = agent.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        Scene { agent, connection: 0, directory }
    }

    /// Waits until it serves.
    fn await_mount(&mut self) {
        let mount = self.directory.path().join("mount");
        while nix::sys::statfs::statfs(&mount).unwrap().filesystem_type()
            != nix::sys::statfs::FUSE_SUPER_MAGIC
        {
            assert!(self.agent.try_wait().unwrap().is_none(), "the agent serves");
            std::thread::sleep(Duration::from_millis(5));
        }
        self.connection = libc::minor(std::fs::metadata(&mount).unwrap().dev()).into();
    }

    /// Kills it; whether it goes away.
    fn kill(&mut self) -> bool {
        self.agent.kill().unwrap();
        ends(&mut self.agent)
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let mount = self.directory.path().join("mount");
        let _ = nix::mount::umount2(&mount, nix::mount::MntFlags::MNT_DETACH);
        if !matches!(self.agent.try_wait(), Ok(Some(_))) {
            abort(self.connection, self.directory.path());
            let _ = self.agent.kill();
            let _ = self.agent.wait();
        }
    }
}

/// Ends a FUSE connection whose server is stuck.
fn abort(connection: u64, directory: &Path) {
    let place = directory.join("connections");
    let _ = std::fs::create_dir(&place);
    let flags = nix::mount::MsFlags::empty();
    let none = None::<&str>;
    if nix::mount::mount(Some("none"), &place, Some("fusectl"), flags, none).is_ok() {
        let _ = std::fs::write(place.join(connection.to_string()).join("abort"), "1");
        let _ = nix::mount::umount2(&place, nix::mount::MntFlags::MNT_DETACH);
    }
}

fn ends(child: &mut Child) -> bool {
    let deadline = Instant::now() + HANG;
    while Instant::now() < deadline {
        if child.try_wait().unwrap().is_some() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

#[test]
fn an_agent_that_is_killed_while_it_flushes_ends() {
    for round in 0..10u64 {
        let mut scene = Scene::new("flush");
        scene.await_mount();
        let mut writer = Command::new("python3");
        let file = scene.directory.path().join("mount/file");
        let mut writer = writer.args(["-c", WRITER]).arg(file).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(150 + round * 3));
        assert!(writer.try_wait().unwrap().is_none(), "the writer writes");
        let ended = scene.kill();
        writer.kill().unwrap();
        let written = ended && ends(&mut writer);
        drop(scene);
        assert!(ended, "round {round}: the agent hangs in its own file system");
        assert!(written, "round {round}: the writer hangs");
    }
}

#[test]
fn an_agent_that_is_killed_while_it_opens_a_file_that_it_serves_ends() {
    let mut scene = Scene::new("open");
    let file = scene.directory.path().join("backing/file");
    let mut blocker = Command::new("python3");
    blocker.args(["-c", BLOCKER]).arg(file).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut blocker = blocker.spawn().unwrap();
    let mut said = BufReader::new(blocker.stdout.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "ready");
    scene.await_mount();
    scene.agent.stdin.take().unwrap().write_all(b"go\n").unwrap();
    // The server is about to answer, and does not come to it.
    assert_eq!(said.next().unwrap().unwrap(), "waits");
    let ended = scene.kill();
    drop(scene);
    blocker.kill().unwrap();
    blocker.wait().unwrap();
    assert!(ended, "the agent hangs in its own file system");
}

/// The threads that serve, each stopped as soon as it has read a request and has not answered.
struct HeldServers(Vec<Pid>);

impl HeldServers {
    /// Takes hold of those of `agent`, which wait for requests.
    fn hold(agent: u32) -> HeldServers {
        let tasks = std::fs::read_dir(format!("/proc/{agent}/task")).unwrap();
        let servers = tasks.flatten().filter(|task| {
            let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            let number = name.trim().strip_prefix("fuser-");
            number.is_some_and(|number| number.parse::<u32>().is_ok())
        });
        let numbers = servers.map(|task| task.file_name().to_str().unwrap().parse().unwrap());
        let threads: Vec<Pid> = numbers.map(Pid::from_raw).collect();
        assert!(!threads.is_empty(), "somebody serves");
        for thread in &threads {
            ptrace::seize(*thread, Options::PTRACE_O_TRACESYSGOOD).unwrap();
            ptrace::interrupt(*thread).unwrap();
            waitpid(*thread, Some(WaitPidFlag::__WALL)).unwrap();
            // It goes back into its read, and waits there.
            ptrace::syscall(*thread, None).unwrap();
            let entered = waitpid(*thread, Some(WaitPidFlag::__WALL)).unwrap();
            assert!(matches!(entered, WaitStatus::PtraceSyscall(_)), "{entered:?}");
            ptrace::syscall(*thread, None).unwrap();
        }
        HeldServers(threads)
    }

    /// Waits until one has a request.
    fn await_request(&self) {
        let deadline = Instant::now() + HANG;
        loop {
            for thread in &self.0 {
                let flags = WaitPidFlag::__WALL | WaitPidFlag::WNOHANG;
                if let WaitStatus::PtraceSyscall(_) = waitpid(*thread, Some(flags)).unwrap() {
                    return;
                }
            }
            assert!(Instant::now() < deadline, "nothing was asked");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Takes leave of those that have ended: the process does not end before.
    fn bury(&self) {
        for thread in &self.0 {
            let _ = waitpid(*thread, Some(WaitPidFlag::__WALL));
        }
    }
}

#[test]
fn an_agent_that_is_killed_while_it_binds_a_socket_in_a_directory_that_it_serves_ends() {
    let mut scene = Scene::new("bind");
    scene.await_mount();
    let held = HeldServers::hold(scene.agent.id());
    scene.agent.stdin.take().unwrap().write_all(b"go\n").unwrap();
    held.await_request();
    scene.agent.kill().unwrap();
    held.bury();
    let ended = ends(&mut scene.agent);
    drop(scene);
    assert!(ended, "the agent hangs in its own file system");
}

#[test]
fn a_socket_is_bound_in_a_directory_that_the_agent_serves() {
    let mut scene = Scene::new("bind");
    scene.await_mount();
    scene.agent.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let bound = ends(&mut scene.agent) && scene.agent.wait().unwrap().success();
    drop(scene);
    assert!(bound, "the agent binds and ends");
}
