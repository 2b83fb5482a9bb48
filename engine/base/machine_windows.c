/* What Windows says about drives and limits (base/machine.h). */
#include "base/machine.h"

#include <stdio.h>
#include <string.h>

#include "windows/winapi.h"
#include <winioctl.h>

/* The drive below a volume answers without any right to read it. */
static void ask_drive(const wchar_t *volume, struct drive_facts *out)
{
    wchar_t device[64];
    STORAGE_PROPERTY_QUERY query = {.QueryType = PropertyStandardQuery};
    DEVICE_SEEK_PENALTY_DESCRIPTOR seek = {0};
    STORAGE_DEVICE_NUMBER number;
    union {
        STORAGE_DEVICE_DESCRIPTOR fixed;
        uint8_t room[1024];
    } drive;
    DWORD got;
    const size_t n = wcslen(volume);
    if (n == 0 || n >= sizeof device / sizeof *device) return;
    wcscpy(device, volume);
    if (device[n - 1] == L'\\') device[n - 1] = L'\0';
    const HANDLE handle = CreateFileW(device, 0, FILE_SHARE_READ | FILE_SHARE_WRITE, NULL,
                                      OPEN_EXISTING, 0, NULL);
    if (handle == INVALID_HANDLE_VALUE) return;
    query.PropertyId = StorageDeviceSeekPenaltyProperty;
    if (DeviceIoControl(handle, IOCTL_STORAGE_QUERY_PROPERTY, &query, sizeof query, &seek,
                        sizeof seek, &got, NULL) && got >= sizeof seek)
        out->rotational = seek.IncursSeekPenalty != 0;
    query.PropertyId = StorageDeviceProperty;
    if (DeviceIoControl(handle, IOCTL_STORAGE_QUERY_PROPERTY, &query, sizeof query, &drive,
                        sizeof drive, &got, NULL) && got >= sizeof drive.fixed)
        out->usb = drive.fixed.BusType == BusTypeUsb;
    if (DeviceIoControl(handle, IOCTL_STORAGE_GET_DEVICE_NUMBER, NULL, 0, &number, sizeof number,
                        &got, NULL))
        snprintf(out->device, sizeof out->device, "PhysicalDrive%lu", number.DeviceNumber);
    (void)CloseHandle(handle);
}

/* Windows has no device numbers: nothing is known. */
void drive_facts_of(const char *root, unsigned major_number, unsigned minor_number,
                    struct drive_facts *out)
{
    (void)root, (void)major_number, (void)minor_number;
    memset(out, 0, sizeof *out);
}

bool drive_facts_read(const char *path, struct drive_facts *out)
{
    struct posix_stat st;
    wchar_t root[WIDE_MOST + 1], volume[64], type[sizeof out->filesystem];
    memset(out, 0, sizeof *out);
    if (posix_stat(path, &st) != 0) return false;
    wchar_t *wide = wide_path(path);
    if (wide == NULL) return true;
    if (GetVolumePathNameW(wide, root, WIDE_MOST)) {
        if (GetVolumeInformationW(root, NULL, 0, NULL, NULL, NULL, type,
                                  sizeof type / sizeof *type))
            snprintf(out->filesystem, sizeof out->filesystem, "%ls", type);
        const UINT kind = GetDriveTypeW(root);
        out->network = kind == DRIVE_REMOTE;
        out->memory = kind == DRIVE_RAMDISK;
        if (GetVolumeNameForVolumeMountPointW(root, volume, sizeof volume / sizeof *volume))
            ask_drive(volume, out);
    }
    free(wide);
    return true;
}

void machine_limits_read(const char *root, struct machine_limits *out)
{
    MEMORYSTATUSEX status;
    (void)root;
    memset(out, 0, sizeof *out);
    memset(&status, 0, sizeof status);
    status.dwLength = sizeof status;
    out->memlock = UINT64_MAX;
    /* The page file is what RAM and page file together exceed RAM by. */
    if (GlobalMemoryStatusEx(&status)) {
        const uint64_t file = status.ullTotalPageFile > status.ullTotalPhys
                                  ? status.ullTotalPageFile - status.ullTotalPhys
                                  : 0;
        const uint64_t promised = status.ullTotalPageFile - status.ullAvailPageFile;
        const uint64_t resident = status.ullTotalPhys - status.ullAvailPhys;
        const uint64_t beyond = promised > resident ? promised - resident : 0;
        out->swap_used = beyond < file ? beyond : file;
    }
}
