//! pidfd_open(2).

use std::os::fd::OwnedFd;

use hotspare_image::objects::PidFd;
use hotspare_image::tree::GuestPid;
use hotspare_kernel::descriptor;

use super::error::{ObjectError, ObjectResult};
use super::fdinfo;
use super::restore::{RestoreContext, set_flags};

const ENDED: GuestPid = GuestPid(-1);

/// Reads from fdinfo whom it stands for: the last number is that in the guest, which is the
/// innermost pid namespace.
pub fn capture(detail: &[u8]) -> ObjectResult<PidFd> {
    let outer = fdinfo::field(detail, "Pid")?;
    if outer == b"-1" {
        return Ok(PidFd { process: ENDED });
    }
    let numbers = fdinfo::field(detail, "NSpid")?;
    let inner = numbers.rsplit(|byte| byte.is_ascii_whitespace()).next().unwrap_or_default();
    match fdinfo::decimal(inner)? {
        0 => Err(ObjectError::refused("a pidfd", "it stands for a process outside the guest")),
        number => Ok(PidFd { process: GuestPid(number as i32) }),
    }
}

/// Opens it anew, on the ghost's process of that number.
pub fn restore(image: &PidFd, flags: u32, context: &RestoreContext<'_>) -> ObjectResult<OwnedFd> {
    let thread = flags & libc::PIDFD_THREAD;
    if image.process == ENDED {
        let file = descriptor::pidfd_of_the_dead()?;
        set_flags(&file, flags)?;
        return Ok(file);
    }
    let process = context.parts.host_pid(image.process).ok_or_else(|| {
        ObjectError::Image(format!("a pidfd of process {}, which is not there", image.process))
    })?;
    let file = descriptor::pidfd(process, thread as i32)?;
    set_flags(&file, flags)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_number_is_the_guests() {
        let pidfd = capture(b"Pid:\t4711\nNSpid:\t4711\t12\n").unwrap();
        assert_eq!(pidfd.process, GuestPid(12));
        assert_eq!(capture(b"Pid:\t-1\nNSpid:\t-1\n").unwrap().process, ENDED);
        capture(b"Pid:\t0\nNSpid:\t0\n").unwrap_err();
    }
}
