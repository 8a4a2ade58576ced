//! Devices without state: /dev/null and its kin.

use std::os::fd::{AsFd, OwnedFd};

use hotspare_image::objects::DeviceFile;
use hotspare_image::tree::HostPath;
use hotspare_kernel::descriptor::{self, FileStat};

use super::class::Class;
use super::error::{ObjectError, ObjectResult};
use super::restore::RestoreContext;

/// A device that behaves the same on every host and keeps nothing (null(4), full(4), random(4)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stateless {
    /// /dev/null.
    Null,
    /// /dev/zero.
    Zero,
    /// /dev/full.
    Full,
    /// /dev/random.
    Random,
    /// /dev/urandom.
    Urandom,
}

const ALL: [(Stateless, &str, (u32, u32)); 5] = [
    (Stateless::Null, "/dev/null", (1, 3)),
    (Stateless::Zero, "/dev/zero", (1, 5)),
    (Stateless::Full, "/dev/full", (1, 7)),
    (Stateless::Random, "/dev/random", (1, 8)),
    (Stateless::Urandom, "/dev/urandom", (1, 9)),
];

/// What the character device at `path` is (devices.txt of the kernel).
pub fn classify(path: &str, stat: &FileStat) -> ObjectResult<Class> {
    if let Some((device, _, _)) = ALL.iter().find(|(_, _, number)| *number == stat.special) {
        return Ok(Class::Device(*device));
    }
    let why = match stat.special {
        // TTYAUX (/dev/tty, /dev/console), virtual consoles, serial lines, pty slaves.
        (5, 0 | 1) | (4 | 204 | 136..=143, _) => return Ok(Class::Terminal),
        (5, 2) => "terminals that the program makes itself (tmux, ssh, script) cannot be moved",
        (10, 200) => "network interfaces of the program's own cannot be moved",
        (10, 229) => "file systems that the program serves cannot be moved",
        (10, 232) => "virtual machines cannot be moved",
        (226, _) | (195, _) => "graphics devices cannot be moved",
        _ => "devices cannot be moved",
    };
    Err(ObjectError::refused(path, why))
}

/// The image of a device.
pub fn capture(device: Stateless) -> DeviceFile {
    let (_, path, _) = ALL.iter().find(|(each, _, _)| *each == device).expect("all are listed");
    DeviceFile { path: HostPath((*path).to_owned()) }
}

/// Opens the device with access mode and status flags `flags`.
pub fn restore(
    image: &DeviceFile,
    flags: u32,
    context: &RestoreContext<'_>,
) -> ObjectResult<OwnedFd> {
    let path = &image.path;
    let wanted = ALL.iter().find(|(_, each, _)| *each == path.0);
    let Some((_, _, number)) = wanted else {
        return Err(ObjectError::Image(format!("{path:?} as a device without state")));
    };
    let file = context.open(path, flags)?;
    if descriptor::stat(file.as_fd())?.special != *number {
        return Err(ObjectError::refused(&path.0, "it is another device on this host"));
    }
    Ok(file)
}
