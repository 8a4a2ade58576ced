//! A guest for tests: this test program once more, which opens what a test asks for, says which
//! numbers it got and stands still.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use hotspare_image::memory::SharedId;
use hotspare_image::objects::{Descriptor, FileId, Object, OpenFile};
use hotspare_image::tree::{ClockReading, GuestPid};
use hotspare_kernel::{HostPid, pidfd};
use hotspare_process::objects::capture::{Captured, DescriptorCapture};
use hotspare_process::objects::error::ObjectError;
use hotspare_process::objects::outside::OutsideDescriptor;
use hotspare_process::objects::restore::{
    GhostParts, RestoreContext, Restored, own_descriptors, restore_all,
};
use hotspare_process::objects::rules::{FileRules, Standing};
use hotspare_process::objects::socket::SocketCapture;
use hotspare_process::objects::table::GuestProcess;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

const ROLE: &str = "HOTSPARE_TEST_GUEST";
const DIRECTORY: &str = "HOTSPARE_TEST_DIRECTORY";

/// Descriptors that the guest's side of a test opened, by name.
pub type Opened = Vec<(&'static str, OwnedFd)>;

/// The guest's side of a test: gets a directory and a number that counts its turns.
pub type Role = fn(&std::path::Path, u32, &mut Opened);

/// To be called from the test `guest_side`: plays the role that the environment names.
pub fn play(roles: &[(&str, Role)]) {
    let Ok(name) = std::env::var(ROLE) else { return };
    let directory = std::path::PathBuf::from(std::env::var(DIRECTORY).unwrap());
    let (_, role) = roles.iter().find(|(each, _)| *each == name).expect("a known role");
    let mut opened = Opened::new();
    let mut turn = 0;
    loop {
        role(&directory, turn, &mut opened);
        for (name, file) in &opened {
            println!("@{name} {}", file.as_raw_fd());
        }
        println!("@. 0");
        std::io::stdout().flush().unwrap();
        let mut line = String::new();
        if std::io::stdin().lock().read_line(&mut line).unwrap() == 0 {
            return;
        }
        turn += 1;
    }
}

/// A running guest; stopped whenever a test looks at it.
pub struct Guest {
    child: Child,
    pidfd: OwnedFd,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    /// Numbers by name.
    pub fds: BTreeMap<String, i32>,
    pub directory: std::path::PathBuf,
}

impl Guest {
    pub fn start(role: &str, directory: &std::path::Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "guest_side", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(DIRECTORY, directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let pidfd = pidfd::open(HostPid(child.id() as i32)).unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        let directory = directory.to_owned();
        let fds = BTreeMap::new();
        let mut guest = Self { child, pidfd, input, output, fds, directory };
        guest.listen();
        guest
    }

    /// Reads which descriptors the guest has, then stops it.
    fn listen(&mut self) {
        self.fds.clear();
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the guest ended");
            // The test runner writes to the same line.
            let Some(at) = line.find('@') else { continue };
            let mut words = line[at + 1..].split_whitespace();
            let (name, fd) = (words.next().unwrap(), words.next().unwrap());
            if name == "." {
                break;
            }
            self.fds.insert(name.to_owned(), fd.parse().unwrap());
        }
        let pid = Pid::from_raw(self.host().0);
        kill(pid, Signal::SIGSTOP).unwrap();
        let stopped = waitpid(pid, Some(WaitPidFlag::WUNTRACED)).unwrap();
        assert!(matches!(stopped, WaitStatus::Stopped(..)), "{stopped:?}");
    }

    /// Lets the guest take its next turn.
    pub fn turn(&mut self) {
        kill(Pid::from_raw(self.host().0), Signal::SIGCONT).unwrap();
        self.input.as_mut().unwrap().write_all(b"\n").unwrap();
        self.listen();
    }

    pub fn host(&self) -> HostPid {
        HostPid(self.child.id() as i32)
    }

    pub fn process(&self) -> GuestProcess<'_> {
        GuestProcess { host: self.host(), pid: GuestPid(2), pidfd: self.pidfd.as_fd() }
    }

    /// The guest's own descriptor, for a look at what it has.
    pub fn take(&self, name: &str) -> OwnedFd {
        pidfd::get_fd(self.pidfd.as_fd(), self.fds[name]).unwrap()
    }

    /// Its pipes to the test are what a guest's standard descriptors are to `hotspare run`.
    pub fn outside(&self) -> Vec<OutsideDescriptor> {
        let one = |fd| OutsideDescriptor::new(fd, pidfd::get_fd(self.pidfd.as_fd(), fd).unwrap());
        (0..3).map(|fd| one(fd).unwrap()).collect()
    }

    pub fn rules(&self) -> FileRules {
        FileRules::new([(self.directory.to_str().unwrap().to_owned(), Standing::Replicated)])
    }

    pub fn end(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn sockets() -> SocketCapture {
    let net = std::fs::File::open("/proc/self/ns/net").unwrap();
    SocketCapture::open(net.as_fd()).unwrap()
}

/// A checkpoint's descriptors that went through their encoding.
pub struct Image {
    pub files: Vec<OpenFile>,
    pub tables: Vec<Vec<Descriptor>>,
    pub captured: Captured,
}

impl Image {
    pub fn file_of(&self, process: usize, fd: i32) -> &OpenFile {
        let id = self.tables[process].iter().find(|each| each.fd == fd).unwrap().file;
        self.files.iter().find(|file| file.id == id).unwrap()
    }
}

/// Captures with what is kept from epoch to epoch.
pub struct Capturing {
    pub kept: DescriptorCapture,
    pub sockets: SocketCapture,
}

impl Capturing {
    pub fn of(guest: &Guest) -> Self {
        let kept = DescriptorCapture::new(guest.rules(), guest.outside());
        Self { kept, sockets: sockets() }
    }

    pub fn capture(&mut self, processes: &[GuestProcess<'_>]) -> Result<Image, ObjectError> {
        let mut name = |_, inode| SharedId(inode);
        let mut captured = self.kept.capture(processes, &mut self.sockets, &mut name)?;
        captured.files.extend(self.kept.resting_files());
        let files = captured.files.iter().map(through_bytes).collect();
        let tables =
            captured.tables.iter().map(|table| table.iter().map(through_bytes).collect()).collect();
        Ok(Image { files, tables, captured })
    }
}

fn through_bytes<T>(value: &T) -> T
where
    T: minicbor::Encode<()> + for<'b> minicbor::Decode<'b, ()> + PartialEq + std::fmt::Debug,
{
    let bytes = minicbor::to_vec(value).unwrap();
    let back = minicbor::decode(&bytes).unwrap();
    assert_eq!(value, &back);
    back
}

/// One capture of one guest.
pub fn capture(guest: &Guest) -> Result<Image, ObjectError> {
    Capturing::of(guest).capture(&[guest.process()])
}

/// The ghost's other parts, as far as tests need them.
#[derive(Default)]
pub struct Parts {
    pub processes: BTreeMap<GuestPid, HostPid>,
    pub shared: BTreeMap<SharedId, OwnedFd>,
    pub clocks: ClockReading,
}

impl GhostParts for Parts {
    fn host_pid(&self, pid: GuestPid) -> Option<HostPid> {
        self.processes.get(&pid).copied()
    }
    fn shared(&self, id: SharedId) -> Option<BorrowedFd<'_>> {
        self.shared.get(&id).map(AsFd::as_fd)
    }
    fn outside(&self, _: i32) -> Option<BorrowedFd<'_>> {
        None
    }
}

pub fn try_restore(
    image: &Image,
    rules: &FileRules,
    parts: &Parts,
) -> Result<Restored, ObjectError> {
    let own = own_descriptors().unwrap();
    let context = RestoreContext::new(parts, rules, parts.clocks, 0, own);
    let tables: Vec<(GuestPid, &[Descriptor])> = image
        .tables
        .iter()
        .enumerate()
        .map(|(index, table)| (GuestPid(2 + index as i32), table.as_slice()))
        .collect();
    restore_all(&image.files, &tables, &context)
}

/// What the test's process has in place of the guest's descriptors.
pub struct Ghost {
    pub restored: Restored,
    ids: BTreeMap<i32, FileId>,
    names: BTreeMap<String, i32>,
}

impl Ghost {
    pub fn of(guest: &Guest, image: &Image, parts: &Parts) -> Self {
        let restored = try_restore(image, &guest.rules(), parts).unwrap();
        let ids = image.tables[0].iter().map(|each| (each.fd, each.file)).collect();
        Self { restored, ids, names: guest.fds.clone() }
    }

    pub fn fd(&self, name: &str) -> &OwnedFd {
        &self.restored.files[&self.ids[&self.names[name]]]
    }
}

/// Captures a guest, ends it, and makes its files anew here.
pub fn move_over(guest: Guest) -> (Image, Ghost) {
    let image = capture(&guest).unwrap();
    let ghost = Ghost::of(&guest, &image, &Parts::default());
    guest.end();
    (image, ghost)
}

/// The lines of our own fdinfo behind the header.
pub fn detail(file: &OwnedFd) -> String {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).unwrap();
    text.lines().skip(4).map(|line| format!("{line}\n")).collect()
}

/// Status flags as fdinfo shows them, without `O_CLOEXEC` and `O_LARGEFILE`.
pub fn flags(file: &OwnedFd) -> u32 {
    let flags = hotspare_kernel::descriptor::status_flags(file.as_fd()).unwrap();
    flags as u32 & !0o2100000
}

pub fn object(image: &Image, guest_fd: i32) -> &Object {
    &image.file_of(0, guest_fd).object
}
