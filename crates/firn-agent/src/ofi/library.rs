//! Loads libfabric, the library for reads of other hosts' memory (RDMA), once for the process. Lists its *providers*,
//! the drivers for the kinds of network.
//!
//! The library is never unloaded. Lists that it allocates are freed by [`InfoList`].

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::transmute;
use std::net::IpAddr;
use std::ptr::{NonNull, null, null_mut};
use std::sync::OnceLock;

use crate::ofi::abi::{
    API_VERSION, EpAttr, FI_CONTEXT, FI_CONTEXT2, FI_EP_RDM, FI_MR_ALLOCATED, FI_MR_ENDPOINT,
    FI_MR_LOCAL, FI_MR_PROV_KEY, FI_MR_VIRT_ADDR, FI_NUMERICHOST, FI_READ, FI_REMOTE_READ, FI_RMA,
    FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6, FI_SOURCE, FI_THREAD_DOMAIN, Fabric, FabricAttr,
    Info,
};
use crate::ofi::error::OfiError;

const FILE: &CStr = c"libfabric.so.1";
/// Providers whose hardware answers reads without a processor of the host, the best first.
const HARDWARE: [&str; 7] = ["verbs", "cxi", "efa", "psm3", "psm2", "opx", "gni"];
/// Providers that reach no other host, or are unreliable. They are used only if an option names them.
const BY_NAME_ONLY: [&str; 4] = ["shm", "sm2", "udp", "net"];

type GetInfo = unsafe extern "C" fn(
    u32,
    *const c_char,
    *const c_char,
    u64,
    *const Info,
    *mut *mut Info,
) -> c_int;
type DupInfo = unsafe extern "C" fn(*const Info) -> *mut Info;
type FreeInfo = unsafe extern "C" fn(*mut Info);
type OpenFabric = unsafe extern "C" fn(*mut FabricAttr, *mut *mut Fabric, *mut c_void) -> c_int;
type StrError = unsafe extern "C" fn(c_int) -> *const c_char;

/// The exported functions of libfabric. All other functions are in tables of its objects.
pub struct Library {
    getinfo: GetInfo,
    dupinfo: DupInfo,
    freeinfo: FreeInfo,
    pub(crate) fabric: OpenFabric,
    strerror: StrError,
}

/// A provider of libfabric that can read remote memory on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provider {
    /// Full name with layers, such as `verbs;ofi_rxm`.
    pub name: String,
}

/// Whether the hardware of a provider answers reads without a processor of the host.
pub fn is_hardware(provider: &str) -> bool {
    HARDWARE.contains(&core_name(provider))
}

/// Whether this host has a device for such a provider. The function asks the kernel, because loading libfabric is slow.
pub fn has_devices() -> bool {
    let has_device_of = |class: &&str| match std::fs::read_dir(format!("/sys/class/{class}")) {
        Ok(mut devices) => devices.next().is_some(),
        Err(_) => false,
    };
    ["infiniband", "cxi"].iter().any(has_device_of)
}

/// Returns the name of a provider without its layers: `tcp` for `tcp;ofi_rxm`.
fn core_name(provider: &str) -> &str {
    provider.split(';').next().unwrap_or(provider)
}

impl Provider {
    /// Whether `wanted` is the provider's full name, or its name without layers.
    pub fn is_named(&self, wanted: &str) -> bool {
        self.name == wanted || core_name(&self.name) == wanted
    }

    /// Whether the provider may be chosen if no option names one.
    pub fn is_for_all(&self) -> bool {
        !BY_NAME_ONLY.contains(&core_name(&self.name))
    }
}

/// A list of entries that libfabric has allocated. Dropping it frees the list.
pub(crate) struct InfoList {
    library: &'static Library,
    first: NonNull<Info>,
}

// SAFETY: the list is plain memory that libfabric has allocated for its caller, and no thread owns it.
unsafe impl Send for InfoList {}

impl InfoList {
    /// Takes over a list that libfabric has allocated. Returns `None` for a null pointer.
    fn from_ptr(library: &'static Library, first_entry: *mut Info) -> Option<Self> {
        let first = NonNull::new(first_entry)?;
        Some(Self { library, first })
    }

    /// Returns the first entry, which libfabric considers the best.
    pub(crate) fn first(&self) -> &Info {
        // SAFETY: libfabric has made the entry, and it is unchanged until this value is dropped.
        unsafe { self.first.as_ref() }
    }

    /// Returns a pointer to the first entry, for calls of libfabric.
    pub(crate) fn as_ptr(&self) -> *mut Info {
        self.first.as_ptr()
    }

    fn entries(&self) -> impl Iterator<Item = &Info> {
        std::iter::successors(Some(self.first()), |info| {
            // SAFETY: the pointer is null, or points to the next entry, which lives as long as the list.
            unsafe { info.next.as_ref() }
        })
    }
}

impl Drop for InfoList {
    fn drop(&mut self) {
        // SAFETY: this library has made the list, and it is freed once.
        unsafe { (self.library.freeinfo)(self.first.as_ptr()) };
    }
}

/// Returns the name of an entry's provider.
pub(crate) fn provider_name(info: &Info) -> String {
    // SAFETY: the pointer is null, or points to a structure that lives as long as `info`.
    let attr = unsafe { info.fabric_attr.as_ref() };
    attr.map_or_else(String::new, |attr| copy_c_string(attr.prov_name))
}

/// Copies a C string. Returns an empty text for a null pointer.
fn copy_c_string(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: strings of libfabric and of the loader end with a zero.
    let string = unsafe { CStr::from_ptr(string) };
    string.to_string_lossy().into_owned()
}

fn loader_error() -> OfiError {
    // SAFETY: dlerror(3) returns null, or a text that is valid until the next call of this thread.
    let message = unsafe { libc::dlerror() };
    OfiError::NoLibrary {
        why: copy_c_string(message),
    }
}

impl Library {
    /// Loads libfabric, once for the whole process. A failure is stored, too.
    pub fn load() -> Result<&'static Self, OfiError> {
        static LOADED: OnceLock<Result<Library, OfiError>> = OnceLock::new();
        let loaded = LOADED.get_or_init(Self::open);
        loaded.as_ref().map_err(Clone::clone)
    }

    /// Loads the shared library libfabric and finds its exported functions. Fails if the library is not installed or
    /// lacks one of them. The library is never unloaded.
    fn open() -> Result<Self, OfiError> {
        // SAFETY: loading runs libfabric's constructors, which change nothing of this program. The library is the one
        // that any program of this user would be linked with. It is never unloaded, so its threads and texts remain
        // valid.
        let handle = unsafe { libc::dlopen(FILE.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let Some(handle) = NonNull::new(handle) else {
            return Err(loader_error());
        };
        // SAFETY: the library is loaded. Each function has the type of the field that it is stored in (rdma/fabric.h,
        // rdma/fi_errno.h), in every version of libfabric.so.1.
        unsafe {
            Ok(Self {
                getinfo: transmute::<*mut c_void, GetInfo>(symbol(handle, c"fi_getinfo")?),
                dupinfo: transmute::<*mut c_void, DupInfo>(symbol(handle, c"fi_dupinfo")?),
                freeinfo: transmute::<*mut c_void, FreeInfo>(symbol(handle, c"fi_freeinfo")?),
                fabric: transmute::<*mut c_void, OpenFabric>(symbol(handle, c"fi_fabric")?),
                strerror: transmute::<*mut c_void, StrError>(symbol(handle, c"fi_strerror")?),
            })
        }
    }

    /// Returns libfabric's text of an error. `code` is the result of a call: the negated number of an error.
    pub(crate) fn describe(&self, code: isize) -> String {
        let error_number = i32::try_from(code.unsigned_abs()).unwrap_or(libc::EIO);
        // SAFETY: the function takes any number and returns a constant text.
        copy_c_string(unsafe { (self.strerror)(error_number) })
    }

    /// Returns the providers (libfabric's drivers for kinds of network) of this host that can read remote memory, in
    /// the order in which they should be tried: hardware first. An error of libfabric counts as none.
    pub fn providers(&'static self) -> Vec<Provider> {
        let Ok(list) = self.request_info(None, None) else {
            return Vec::new();
        };
        let mut providers: Vec<Provider> = Vec::new();
        for info in list.entries() {
            let name = provider_name(info);
            let is_new = providers.iter().all(|provider| provider.name != name);
            if is_new {
                providers.push(Provider { name });
            }
        }
        providers.sort_by_key(|provider| {
            let core = core_name(&provider.name);
            let hardware_rank = HARDWARE.iter().position(|name| *name == core);
            let rank = hardware_rank.unwrap_or(HARDWARE.len());
            (rank, !provider.is_for_all())
        });
        providers
    }

    /// Returns libfabric's entries for a provider (its driver for one kind of network): the ways to open an endpoint.
    /// There is at least one.
    ///
    /// If the provider uses IP addresses, the entries are those of the network interface with the address `local_ip`,
    /// or of any interface if there are none.
    pub(crate) fn find(
        &'static self,
        provider: &str,
        local_ip: Option<IpAddr>,
    ) -> Result<InfoList, OfiError> {
        let Ok(all_entries) = self.request_info(Some(provider), None) else {
            return Err(OfiError::NoProvider {
                wanted: provider.into(),
                found: self.provider_names(),
            });
        };
        let ip_formats = [FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6];
        let uses_ip = ip_formats.contains(&all_entries.first().addr_format);
        if local_ip.is_none() || !uses_ip {
            return Ok(all_entries);
        }
        let entries = self.request_info(Some(provider), local_ip);
        // The device of the provider may have other addresses than the TCP interface.
        Ok(entries.unwrap_or(all_entries))
    }

    /// Returns the names of all providers as one text, for an error message.
    fn provider_names(&'static self) -> String {
        let providers = self.providers();
        let names: Vec<_> = providers
            .into_iter()
            .map(|provider| provider.name)
            .collect();
        if names.is_empty() {
            "none".into()
        } else {
            names.join(", ")
        }
    }

    /// Requests libfabric's entries (ways to open an endpoint) of one provider, its driver for one kind of network, or
    /// of all. With a `local_ip`, they are those of the network interface with this address.
    ///
    /// The error is a negated error number. An empty list is an error too.
    fn request_info(
        &'static self,
        provider: Option<&str>,
        local_ip: Option<IpAddr>,
    ) -> Result<InfoList, isize> {
        let hints = self.make_hints(provider)?;
        let node = local_ip.map(|ip| CString::new(ip.to_string()).expect("no zero byte"));
        let (node_ptr, flags) = match &node {
            Some(node) => (node.as_ptr(), FI_SOURCE | FI_NUMERICHOST),
            None => (null(), 0),
        };
        let any_service = null();
        let mut first_entry = null_mut();
        // SAFETY: libfabric has allocated the hints, the node is null or a C string, and `InfoList` frees the entries.
        let code = unsafe {
            (self.getinfo)(
                API_VERSION,
                node_ptr,
                any_service,
                flags,
                hints.as_ptr(),
                &mut first_entry,
            )
        };
        // The entries are also freed after an error.
        let list = InfoList::from_ptr(self, first_entry);
        match (code, list) {
            (0, Some(list)) => Ok(list),
            _ => Err(code as isize),
        }
    }

    /// Makes the entry that describes to libfabric what this program needs: reads of remote memory between endpoints of
    /// type RDM, which need no connection. With a `provider`, only that driver is asked for.
    fn make_hints(&'static self, provider: Option<&str>) -> Result<InfoList, isize> {
        let no_memory = -(libc::ENOMEM as isize);
        // SAFETY: with a null pointer fi_dupinfo allocates an empty entry and its parts.
        let entry = unsafe { (self.dupinfo)(null()) };
        let list = InfoList::from_ptr(self, entry).ok_or(no_memory)?;
        // SAFETY: the entry was just made, and only this function uses it. Its parts are allocated with it, or null.
        unsafe {
            let info = &mut *list.first.as_ptr();
            info.caps = FI_RMA | FI_READ | FI_REMOTE_READ;
            // The modes are demands of providers that this program can meet. Providers with other demands are left out.
            info.mode = FI_CONTEXT | FI_CONTEXT2;
            let endpoint: &mut EpAttr = info.ep_attr.as_mut().ok_or(no_memory)?;
            endpoint.kind = FI_EP_RDM;
            let domain = info.domain_attr.as_mut().ok_or(no_memory)?;
            domain.threading = FI_THREAD_DOMAIN;
            domain.mr_mode =
                FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
            let fabric = info.fabric_attr.as_mut().ok_or(no_memory)?;
            if let Some(provider) = provider {
                let name = CString::new(provider).map_err(|_| -(libc::EINVAL as isize))?;
                // libfabric frees the name with free(3).
                fabric.prov_name = libc::strdup(name.as_ptr());
            }
        }
        Ok(list)
    }
}

/// Looks up a function of a loaded library.
///
/// # Safety
/// `handle` is that of a loaded library.
unsafe fn symbol(handle: NonNull<c_void>, name: &CStr) -> Result<*mut c_void, OfiError> {
    // SAFETY: the library is loaded, and the name ends with a zero.
    let address = unsafe { libc::dlsym(handle.as_ptr(), name.as_ptr()) };
    if address.is_null() {
        return Err(loader_error());
    }
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_provider_is_named_with_or_without_its_layers() {
        let provider = Provider {
            name: "verbs;ofi_rxm".into(),
        };
        assert!(provider.is_named("verbs") && provider.is_named("verbs;ofi_rxm"));
        assert!(!provider.is_named("ofi_rxm") && !provider.is_named("verb"));
        assert!(is_hardware("verbs;ofi_rxm") && is_hardware("cxi"));
        assert!(!is_hardware("tcp;ofi_rxm") && !is_hardware("shm") && !is_hardware(""));
    }
}
